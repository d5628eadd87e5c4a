// Ordered gather: host tables, large batches. Continues gather.cu.
//
// A row of host memory costs an address translation, and is cheaper when its neighbours are asked for at the
// same time. So ids are put in order of address (buckets of a page or so; order inside a bucket is
// arbitrary), an id that repeats is read once and copied afterwards, and few rows are in flight at a time.
// Workspace: counters, slots (both zeroed before), ranks, leaders, entries.

struct Entry {
    i64 row; // of the shard; -1 for zeros; -2 - k for a copy of the k-th id's row
    u32 item, table;
};

__device__ __forceinline__ u32 round4(u32 count) { return (count + 3) / 4 * 4; }
__device__ __forceinline__ u32 real_buckets(const Args& a) { return a.tables * a.buckets; }
__device__ __forceinline__ u32* counters_of(const Args& a) { return (u32*)a.workspace; }
__device__ __forceinline__ u32* slots_of(const Args& a) { return counters_of(a) + round4(real_buckets(a) + 2 * SPREAD); }
__device__ __forceinline__ u32* ranks_of(const Args& a) { return slots_of(a) + a.slot_mask + 1; }
__device__ __forceinline__ u32* leaders_of(const Args& a) { return ranks_of(a) + round4(a.tables * a.items); }
__device__ __forceinline__ Entry* entries_of(const Args& a) { return (Entry*)(leaders_of(a) + round4(a.tables * a.items)); }

// The index of the id that stands for all equal ids of this table: whoever took the slot first.
__device__ u32 leader_of(const Args& a, const Wanted& wanted) {
    const u32 self = wanted.table * a.items + wanted.item;
    u32* slots = slots_of(a);
    u64 mixed = ((u64)wanted.id + wanted.table) * 0x9E3779B97F4A7C15ull;
    for (u32 slot = (u32)(mixed >> 32) & a.slot_mask;; slot = (slot + 1) & a.slot_mask) {
        u32 taken = *(volatile u32*)(slots + slot); // most repeats need no atomic
        if (taken == 0) taken = atomicCAS(slots + slot, 0u, self + 1);
        if (taken == 0) return self;
        const u32 other = taken - 1, table = other / a.items;
        if (table == wanted.table && wanted_at(a, table, other - table * a.items).id == wanted.id) return other;
    }
}

__device__ __forceinline__ u32 bucket_of(const Args& a, const Wanted& wanted, i64 row, bool leads) {
    if (row < 0) return real_buckets(a) + wanted.item % SPREAD;
    if (!leads) return real_buckets(a) + SPREAD + wanted.item % SPREAD;
    return wanted.table * a.buckets + (u32)(row >> a.bucket_shift);
}

// One thread an id; grid y is the table.
extern "C" __global__ void __launch_bounds__(256) order_count(const __grid_constant__ Args a) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, table = blockIdx.y;
    if (item >= a.items) return;
    const u32 self = table * a.items + item;
    const Wanted wanted = wanted_at(a, table, item);
    const i64 row = row_of(a, wanted);
    check_unread(a, wanted, row);
    const u32 leader = row < 0 ? self : leader_of(a, wanted);
    leaders_of(a)[self] = leader;
    ranks_of(a)[self] = atomicAdd(&counters_of(a)[bucket_of(a, wanted, row, leader == self)], 1u);
}

__device__ __forceinline__ u32 sum_before(u32 value, u32 lane) { // sum over this lane and those before
    for (u32 distance = 1; distance < 32; distance *= 2) {
        const u32 other = __shfl_up_sync(~0u, value, distance);
        if (lane >= distance) value += other;
    }
    return value;
}

// Counters to the first place of each bucket, in one block: each warp sums a run of counters, the sums are
// scanned, each warp scans its run.
extern "C" __global__ void __launch_bounds__(1024) order_scan(const __grid_constant__ Args a) {
    __shared__ u32 sums[32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const u32 count = round4(real_buckets(a) + 2 * SPREAD) / 4; // in vectors of four
    const u32 begin = count * warp / warps, end = count * (warp + 1) / warps;
    uint4* counters = (uint4*)counters_of(a);
    u32 sum = 0;
#pragma unroll 4
    for (u32 k = begin + lane; k < end; k += 32) {
        const uint4 v = counters[k];
        sum += v.x + v.y + v.z + v.w;
    }
    sum = sum_before(sum, lane);
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) sums[lane] = sum_before(lane < warps ? sums[lane] : 0, lane);
    __syncthreads();
    u32 before = warp == 0 ? 0 : sums[warp - 1];
    for (u32 first = begin; first < end; first += 32) {
        const bool inside = first + lane < end;
        const uint4 v = inside ? counters[first + lane] : make_uint4(0, 0, 0, 0);
        const u32 own = v.x + v.y + v.z + v.w, upto = sum_before(own, lane), at = before + upto - own;
        if (inside) counters[first + lane] = make_uint4(at, at + v.x, at + v.x + v.y, at + v.x + v.y + v.z);
        before += __shfl_sync(~0u, upto, 31);
    }
}

extern "C" __global__ void __launch_bounds__(256) order_place(const __grid_constant__ Args a) {
    const u32 item = blockIdx.x * blockDim.x + threadIdx.x, table = blockIdx.y;
    if (item >= a.items) return;
    const u32 self = table * a.items + item, leader = leaders_of(a)[self];
    const Wanted wanted = wanted_at(a, table, item);
    const i64 row = row_of(a, wanted);
    const u32 place = counters_of(a)[bucket_of(a, wanted, row, leader == self)] + ranks_of(a)[self];
    entries_of(a)[place] = Entry{leader != self ? -2 - (i64)leader : row < 0 ? -1 : row, item, table};
}

__device__ __forceinline__ Entry entry_at(const Args& a, u32 index) {
    const int4 v = *(const int4*)(entries_of(a) + index); // one load
    return Entry{(i64)((u64)(u32)v.x | (u64)(u32)v.y << 32), (u32)v.z, (u32)v.w};
}

// Reads the rows that must be read, a warp a row. The grid bounds how many are in flight.
template <bool RAW> __device__ __forceinline__ void gather_ordered(const Args& a) {
    const u32 lane = threadIdx.x % 32, step = gridDim.x * blockDim.x / 32;
    const u32 reads = counters_of(a)[real_buckets(a)];
    u32 index = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (index >= reads) return;
    Entry next = entry_at(a, index);
#pragma unroll 1
    for (; index < reads; index += step) {
        const Entry entry = next;
        next = entry_at(a, index + step < reads ? index + step : index); // while the row is on its way
        const Table& table = a.target[entry.table].table;
        Piece<8> piece;
        load_piece(piece, row_at(table.values, entry.row, a.value_stride), row_at(table.scales, entry.row, a.scale_stride), lane);
        store_row<8, RAW>(a, entry.table, entry.item, piece, lane);
    }
}

// Writes the zero rows and the copies, a warp a row, after gather_ordered.
template <bool RAW> __device__ __forceinline__ void fill_ordered(const Args& a) {
    const u32 lane = threadIdx.x % 32, step = gridDim.x * blockDim.x / 32, stop = a.tables * a.items;
    const u32 reads = counters_of(a)[real_buckets(a)];
    for (u32 index = reads + (blockIdx.x * blockDim.x + threadIdx.x) / 32; index < stop; index += step) {
        const Entry entry = entry_at(a, index);
        const Output& out = a.target[entry.table].out;
        const bool copies = entry.row < -1;
        const u32 from = copies ? (u32)(-2 - entry.row) - entry.table * a.items : 0;
        const u8* source = out.values + (u64)from * a.out_value_stride;
        u8* to = out.values + (u64)entry.item * a.out_value_stride;
        if constexpr (RAW) {
            *(uint2*)(to + lane * 8) = copies ? *(const uint2*)(source + lane * 8) : make_uint2(0, 0);
            const u8* scales = out.scales + (u64)from * a.out_scale_stride;
            if (lane < 8) out.scales[(u64)entry.item * a.out_scale_stride + lane] = copies ? scales[lane] : 0;
        } else {
            *(uint4*)(to + lane * 16) = copies ? *(const uint4*)(source + lane * 16) : make_uint4(0, 0, 0, 0);
        }
    }
}

#define ORDERED(NAME, BODY)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ Args a) { BODY(a); }

ORDERED(gather_ordered_bf16, gather_ordered<false>)
ORDERED(gather_ordered_raw, gather_ordered<true>)
ORDERED(fill_ordered_bf16, fill_ordered<false>)
ORDERED(fill_ordered_raw, fill_ordered<true>)
