// Gathers rows of Engram tables: 256 FP8 (E4M3) values and 8 E8M0 scales each, to bfloat16 or as stored.
//
// In this order: types; loads and stores; values; index arithmetic and the rules for ids; sources; kernels.
// ordered.cu goes on with large batches of host tables and is compiled in one piece with this.
// Compiled by NVRTC without any header, for sm_80 and later. engram_client/lookup/packing.py holds the
// mirror of the structs, shapes.py the shape of each launch.
//
// Assumptions that the host has checked: every address is readable from this GPU; packed rows are
// 8-byte aligned and planar ones 16-byte; outputs are 16-byte aligned; fewer than 2^31 ids in a launch; fewer
// than 2^32 rows in a part of a table.
// Offsets into tables are 64 bits: one table is 94 GiB.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ROW_VALUES = 256;
constexpr u32 VALUES_PER_SCALE = 32;
constexpr u32 PACKED_ROW = 264;
constexpr u32 BF16_ROW = 2 * ROW_VALUES;
constexpr u32 NEUTRAL_SCALE = 127; // 2^0
constexpr u32 NAN_SCALE = 255;
constexpr u32 BF16_NAN = 0x7FC0;
constexpr u32 MAX_TABLES = 4;
constexpr u32 MAX_SHARDS = 64;
// Rows that are not read from the table share so many buckets of the sort, zero rows (padding, invalid ids,
// other shards) and copies of repeated ids each: one bucket alone would make them all wait for one counter.
constexpr u32 SPREAD = 64;
constexpr u32 OWNER_SHIFT = 31;
constexpr u32 FEW_THREADS = 256; // a block of gather_few

struct Output {
    u8* values;
    u8* scales; // null for bfloat16
};

struct Table {
    const u8* values; // of row `start`
    const u8* scales;
    i64 start, count;         // the rows that this launch may read, fewer than 2^32; others give zeros
    i64 rows;                 // rows of the whole table; ids from here on are invalid
    const i64* column_starts; // [columns + 1], or null where ids are not hashed
    u64* invalid;             // [3]: how many invalid ids, one of them, its position
    u16 shard_first, shard_count; // 16 bits each, so that a table fills one 64-byte line
    u32 owner_multiplier; // times a column, shifted right by OWNER_SHIFT: the shard that holds it; 0 to search by row
};

struct Target {
    Output out;
    Table table;
};

// TABLES targets; fewer targets are a prefix of more, so one host buffer serves both. A launch of one token
// waits for each 64-byte line of its parameters that it reads: what it needs fills two (on sm_90 parameters
// begin 16 bytes into a line), after a line of what only others need.
template <u32 TABLES> struct ArgsFor {
    u8* workspace;
    i64 table_stride; // bytes from table to table in the ids
    u32 tables;
    u32 out_scale_stride;
    u32 bucket_shift, buckets; // buckets of 2^bucket_shift rows, `buckets` a table
    u32 slot_mask;             // slots - 1 of the hash table that finds repeated ids
    u32 unused[3];
    const u8* ids;
    u32 token_stride, column_stride; // bytes
    u32 items;                       // ids a table: tokens * columns
    u32 columns, division_multiplier, division_shift;
    u32 value_stride, scale_stride; // bytes from row to row in the table
    u32 out_value_stride;           // and in the output
    u32 id_bytes;                   // 4 or 8
    Target target[TABLES];
};

typedef ArgsFor<1> Args1;
typedef ArgsFor<MAX_TABLES> Args;

struct Shard {
    const u8* values;
    const u8* scales;
    i64 start;
};

struct Shards {
    Shard shard[MAX_SHARDS];
};

// ---- Loads and stores -------------------------------------------------------------------------------

// What one lane holds of a row: W bytes of values and the scale byte that they share.
template <int W> struct Piece {
    u32 words[W / 4];
    u32 scale;
};

// A row is read once: keeping it in L1 would only push out ids and column starts.
__device__ __forceinline__ void load_once(u32 (&w)[2], const u8* p) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
}

__device__ __forceinline__ void load_once(u32 (&w)[4], const u8* p) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(p));
}

__device__ __forceinline__ u32 load_once(const u8* p) {
    u32 byte;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(byte) : "l"(p));
    return byte;
}

__device__ __forceinline__ void store8(u8* p, u32 a, u32 b) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store16(u8* p, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

template <int W> __device__ __forceinline__ void load_piece(Piece<W>& piece, const u8* values, const u8* scales, u32 lane) {
    load_once(piece.words, values + lane * W);
    piece.scale = load_once(scales + lane * W / VALUES_PER_SCALE);
}

template <int W> __device__ __forceinline__ void zero_piece(Piece<W>& piece, u32 scale) {
    for (u32& word : piece.words) word = 0;
    piece.scale = scale;
}

// ---- Values: fp32(e4m3) * 2^(scale - 127), rounded once to bfloat16, one zero and one NaN ------------

__device__ __forceinline__ float scale_factor(u32 scale) {
    // 2^-127 is a subnormal: there is no exponent field for it.
    return __uint_as_float(scale == 0 ? 0x00400000u : scale << 23);
}

// The two low codes of `pair` as floats. A NaN code gives an arbitrary number: callers look at the code.
__device__ __forceinline__ void decode2(u32 pair, float& low, float& high) {
#if __CUDA_ARCH__ >= 890
    u32 halves;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a;}" : "=r"(halves) : "r"(pair));
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(low), "=f"(high) : "r"(halves));
#else
    // The code's exponent and mantissa at fp32's place are the value times 2^-120, subnormals included.
    const float up = __uint_as_float((127u + 120u) << 23);
    low = __uint_as_float((pair & 0x80u) << 24 | (pair & 0x7Fu) << 20) * up;
    high = __uint_as_float((pair & 0x8000u) << 16 | (pair & 0x7F00u) << 12) * up;
#endif
}

__device__ __forceinline__ bool has_nan_code(u32 word) {
    return (((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u) != 0;
}

// For scales 3 to 254 and codes that are no NaN the product has at most 4 significant bits and its lowest
// is at least 2^-133, so bfloat16 holds it exactly (or it is infinite in both): the upper half of the fp32
// is the result. Adding +0 turns -0 into +0 in the same instruction.
__device__ __forceinline__ u32 exact2(u32 pair, float factor) {
    float low, high;
    decode2(pair, low, high);
    low = __fmaf_rn(low, factor, 0.0f);
    high = __fmaf_rn(high, factor, 0.0f);
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

__device__ __forceinline__ u32 rounded1(float value, u32 code, u32 scale) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value * scale_factor(scale)));
    const bool is_nan = scale == NAN_SCALE || (code & 0x7Fu) == 0x7Fu;
    const bool is_zero = (bits & 0x7FFFu) == 0; // also what rounded to zero
    return is_nan ? BF16_NAN : is_zero ? 0u : (u32)bits;
}

__device__ __forceinline__ u32 rounded2(u32 pair, u32 scale) {
    float low, high;
    decode2(pair, low, high);
    return rounded1(low, pair, scale) | rounded1(high, pair >> 8, scale) << 16;
}

// The general case for 4 values, rare: a call, because a launch of one token pays for every instruction that
// it has to fetch on its way.
__device__ __noinline__ void store_rounded(u8* out, u32 word, u32 scale) {
    store8(out, rounded2(word & 0xFFFFu, scale), rounded2(word >> 16, scale));
}

template <int W> __device__ __forceinline__ bool is_exact(const Piece<W>& piece) {
    bool exact = piece.scale - 3u <= 251u;
#pragma unroll
    for (int k = 0; k < W / 4; k++) exact = exact && !has_nan_code(piece.words[k]);
    return exact;
}

template <int W> __device__ __forceinline__ void store_exact(u8* out, const Piece<W>& piece, u32 lane) {
    u8* to = out + lane * W * 2;
    const float factor = __uint_as_float(piece.scale << 23); // exact scales are not 0
    u32 result[W / 2];
#pragma unroll
    for (int k = 0; k < W / 2; k++) result[k] = exact2(piece.words[k / 2] >> (k % 2 * 16), factor);
#pragma unroll
    for (int k = 0; k < W / 2; k += 4) store16(to + k * 4, result[k], result[k + 1], result[k + 2], result[k + 3]);
}

template <int W> __device__ __forceinline__ void store_inexact(u8* out, const Piece<W>& piece, u32 lane) {
    u8* to = out + lane * W * 2;
#pragma unroll
    for (int k = 0; k < W / 4; k++) store_rounded(to + k * 8, piece.words[k], piece.scale);
}

template <int W> __device__ __forceinline__ void store_bf16(u8* out, const Piece<W>& piece, u32 lane) {
    if (__builtin_expect(is_exact(piece), 1)) store_exact(out, piece, lane);
    else store_inexact(out, piece, lane);
}

// Only W = 8: rows of 264 bytes are 8-byte aligned.
__device__ __forceinline__ void store_raw(u8* values, u8* scales, const Piece<8>& piece, u32 lane) {
    store8(values + lane * 8, piece.words[0], piece.words[1]);
    if (lane % 4 == 0) scales[lane / 4] = (u8)piece.scale;
}

template <int W, bool RAW, class A> __device__ __forceinline__ void store_row(const A& a, u32 table, u32 item, const Piece<W>& piece, u32 lane) {
    const Output& out = a.target[table].out;
    u8* values = out.values + (u64)item * a.out_value_stride;
    if constexpr (RAW) {
        store_raw(values, out.scales + (u64)item * a.out_scale_stride, piece, lane);
    } else {
        store_bf16(values, piece, lane);
    }
}

// ---- Index arithmetic and the rules for ids ----------------------------------------------------------

// item / columns, for items below 2^31 (Granlund and Montgomery's multiply and shift).
template <class A> __device__ __forceinline__ u32 token_of(const A& a, u32 item) {
    return (__umulhi(item, a.division_multiplier) + item) >> a.division_shift;
}

template <class ID> __device__ __forceinline__ i64 load_id(const u8* p) {
    i64 id;
    if constexpr (sizeof(ID) == 8) asm volatile("ld.global.s64 %0, [%1];" : "=l"(id) : "l"(p));
    else asm volatile("ld.global.s32 %0, [%1];" : "=l"(id) : "l"(p));
    return id;
}

template <class A> __device__ __forceinline__ i64 load_id(const A& a, u32 table, u32 token, u32 column) {
    const u8* p = a.ids + table * a.table_stride + (u64)token * a.token_stride + (u64)column * a.column_stride;
    return a.id_bytes == 8 ? load_id<i64>(p) : load_id<int>(p);
}

// One wanted row on its way: which id, and where its values go.
struct Wanted {
    i64 id;
    u32 item, table, column;
};

template <class A> __device__ __forceinline__ Wanted wanted_at(const A& a, u32 table, u32 item) {
    const u32 token = token_of(a, item), column = item - token * a.columns;
    return Wanted{load_id(a, table, token, column), item, table, column};
}

// `starts` points to the column's first row; that of the next column follows.
__device__ __forceinline__ bool in_column(const i64* starts, i64 id) {
    const i64 first = starts[0], stop = starts[1]; // both reads at once, beside that of the id
    return (id >= first) & (id < stop);
}

// The wanted row within what this launch may read, or -1 for a row of zeros. In a hashed batch an id must lie
// in its column's range.
template <class A> __device__ __forceinline__ i64 row_of(const A& a, const Wanted& wanted) {
    const Table& table = a.target[wanted.table].table;
    const i64 row = wanted.id - table.start;
    bool reads = (u64)row < (u64)table.count;
    if (table.column_starts) reads = reads & in_column(table.column_starts + wanted.column, wanted.id);
    return reads ? row : -1;
}

// Decides why a row was not read; counts the id if it is invalid, and keeps the first that comes. Negative
// ids are padding, and in a hashed batch an idle slot has id 0 in every column: neither is invalid.
__device__ __noinline__ void examine(const i64* column_starts, i64 rows, u64* invalid, i64 id, u32 column, u32 item) {
    const bool valid = column_starts ? id == 0 || in_column(column_starts + column, id) : id < rows;
    if (id < 0 || valid) return;
    if (atomicAdd(invalid, 1ull) == 0) {
        invalid[1] = (u64)id;
        invalid[2] = item;
    }
}

template <class A> __device__ __forceinline__ void check_unread(const A& a, const Wanted& wanted, i64 row) {
    const Table& table = a.target[wanted.table].table;
    if (__builtin_expect(row < 0, 0)) examine(table.column_starts, table.rows, table.invalid, wanted.id, wanted.column, wanted.item);
}

// Row `row` of what begins at `base`: rows are counted in 32 bits, bytes in 64.
__device__ __forceinline__ const u8* row_at(const u8* base, i64 row, u32 stride) { return base + (u64)(u32)row * stride; }

// ---- Sources: where the k-th row of a launch comes from ----------------------------------------------
// want() starts the read of an id, row() decides, locate() gives addresses, check() reports. Kept apart so that the reads of
// several rows are in flight before the first of them is needed.

template <class A> struct InPlace {
    const A& a;
    __device__ Wanted want(u32 index) const { return wanted_at(a, sizeof(A) == sizeof(Args1) ? 0 : blockIdx.y, index); }
    __device__ i64 row(const Wanted& wanted) const { return row_of(a, wanted); }
    __device__ void check(const Wanted& wanted, i64 row) const { check_unread(a, wanted, row); }
    __device__ void locate(const Wanted& wanted, i64 row, const u8*& values, const u8*& scales) const {
        const Table& table = a.target[wanted.table].table;
        values = row_at(table.values, row, a.value_stride);
        scales = row_at(table.scales, row, a.scale_stride);
    }
};

struct Peers {
    const Args& a;
    const Shards& shards;
    // Which of the table's shards holds the row. Where each holds equally many whole hash columns, and row() has seen
    // that the id lies in its column, the column alone says it: no reads that wait for one another.
    __device__ u32 owner(const Table& table, const Wanted& wanted, i64 row) const {
        if (table.owner_multiplier) return (u32)((u64)wanted.column * table.owner_multiplier >> OWNER_SHIFT);
        u32 low = 0, high = table.shard_count;
        while (high - low > 1) { // to the last shard that starts at or before the row
            const u32 middle = (low + high) / 2;
            if (shards.shard[table.shard_first + middle].start <= row) low = middle;
            else high = middle;
        }
        return low;
    }
    __device__ Wanted want(u32 index) const { return wanted_at(a, blockIdx.y, index); }
    __device__ i64 row(const Wanted& wanted) const { return row_of(a, wanted); }
    __device__ void check(const Wanted& wanted, i64 row) const { check_unread(a, wanted, row); }
    __device__ void locate(const Wanted& wanted, i64 row, const u8*& values, const u8*& scales) const {
        const Table& table = a.target[wanted.table].table;
        const Shard& shard = shards.shard[table.shard_first + owner(table, wanted, row)];
        values = row_at(shard.values, row - shard.start, a.value_stride);
        scales = row_at(shard.scales, row - shard.start, a.scale_stride);
    }
};

// What an exchange of raw rows left at table 0: [shard_count, tokens, columns / shard_count, 264].
struct Exchanged {
    const Args1& a;
    __device__ Wanted want(u32 index) const { return Wanted{0, index, 0, index - token_of(a, index) * a.columns}; }
    __device__ void check(const Wanted&, i64) const {}
    __device__ i64 row(const Wanted& wanted) const {
        const u32 columns = a.columns / a.target[0].table.shard_count; // of a shard
        const u32 tokens = token_of(a, a.items), token = token_of(a, wanted.item);
        return ((i64)(wanted.column / columns) * tokens + token) * columns + wanted.column % columns;
    }
    __device__ void locate(const Wanted&, i64 row, const u8*& values, const u8*& scales) const {
        values = row_at(a.target[0].table.values, row, PACKED_ROW);
        scales = values + ROW_VALUES;
    }
};

// ---- Gather: each group of 256 / W lanes takes ROWS rows at a time -----------------------------------

struct Span {
    u32 first, stop, step;
};

// Consecutive groups of the whole grid take consecutive rows; any number of blocks is right.
template <int W> __device__ __forceinline__ Span grid_span(u32 items) {
    constexpr u32 LANES = ROW_VALUES / W;
    return Span{(blockIdx.x * blockDim.x + threadIdx.x) / LANES, items, gridDim.x * blockDim.x / LANES};
}

template <int W, int ROWS, bool RAW, class A, class Source>
__device__ __forceinline__ void gather(const A& a, const Source& source, const Span span) {
    const u32 lane = threadIdx.x % (ROW_VALUES / W);
    for (u32 first = span.first; first < span.stop; first += span.step * ROWS) {
        Wanted wanted[ROWS];
        i64 row[ROWS];
        Piece<W> piece[ROWS];
        bool inside[ROWS];
#pragma unroll
        for (u32 k = 0; k < ROWS; k++) {
            const u32 index = first + k * span.step;
            inside[k] = k == 0 || index < span.stop;
            wanted[k] = source.want(inside[k] ? index : first); // past the end: the first again, stored nowhere
        }
#pragma unroll
        for (u32 k = 0; k < ROWS; k++) row[k] = source.row(wanted[k]);
#pragma unroll
        for (u32 k = 0; k < ROWS; k++) {
            zero_piece(piece[k], RAW ? 0 : NEUTRAL_SCALE);
            if (row[k] < 0 || !inside[k]) continue;
            const u8 *values, *scales;
            source.locate(wanted[k], row[k], values, scales);
            load_piece(piece[k], values, scales, lane);
        }
#pragma unroll
        for (u32 k = 0; k < ROWS; k++) {
            if (lane == 0 && inside[k]) source.check(wanted[k], row[k]);
            if (inside[k]) store_row<W, RAW>(a, wanted[k].table, wanted[k].item, piece[k], lane);
        }
    }
}

// The same for one table and few tokens, where each instruction shows: grid x is the token, y and the warps
// of a block are its columns. What other kernels ask their parameters is compiled in, and what is rare comes after
// the store: a launch of one token waits for each 128 bytes of code on its way.
template <u32 VALUE_STRIDE, u32 SCALE_STRIDE, class ID, bool HASHED> __device__ __forceinline__ void gather_few(const Args1& a) {
    const u32 lane = threadIdx.x % 32, column = blockIdx.y * (FEW_THREADS / 32) + threadIdx.x / 32;
    if (column >= a.columns) return;
    const Table& table = a.target[0].table;
    const i64 id = load_id<ID>(a.ids + (u64)blockIdx.x * a.token_stride + (u64)column * a.column_stride);
    const u32 item = blockIdx.x * a.columns + column;
    u8* to = a.target[0].out.values + (u64)item * BF16_ROW;
    const i64 row = id - table.start;
    bool reads = (u64)row < (u64)table.count;
    if constexpr (HASHED) reads = reads & in_column(table.column_starts + column, id);
    Piece<8> piece;
    zero_piece(piece, NEUTRAL_SCALE);
    if (reads) {
        load_once(piece.words, row_at(table.values, row, VALUE_STRIDE) + lane * 8);
        piece.scale = load_once(row_at(table.scales, row, SCALE_STRIDE) + lane / 4);
    }
    store_exact(to, piece, lane);
    if (__builtin_expect(reads & is_exact(piece), 1)) return;
    if (reads) {
        store_inexact(to, piece, lane);
    } else if (lane == 0) {
        examine(HASHED ? table.column_starts : nullptr, table.rows, table.invalid, id, column, item);
    }
}

#define GATHER_FEW(NAME, VALUE_STRIDE, SCALE_STRIDE)                                                         \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) NAME##_i32(const __grid_constant__ Args1 a) {  \
        gather_few<VALUE_STRIDE, SCALE_STRIDE, int, false>(a);                                               \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) NAME##_i64(const __grid_constant__ Args1 a) {  \
        gather_few<VALUE_STRIDE, SCALE_STRIDE, i64, false>(a);                                               \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) NAME##_hashed_i32(const __grid_constant__ Args1 a) { \
        gather_few<VALUE_STRIDE, SCALE_STRIDE, int, true>(a);                                                \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(FEW_THREADS) NAME##_hashed_i64(const __grid_constant__ Args1 a) { \
        gather_few<VALUE_STRIDE, SCALE_STRIDE, i64, true>(a);                                                \
    }

GATHER_FEW(gather_few_planar, ROW_VALUES, ROW_VALUES / VALUES_PER_SCALE)
GATHER_FEW(gather_few_packed, PACKED_ROW, PACKED_ROW)

// Grid: x covers the ids of one table, y the tables.
#define GATHER(NAME, W, ROWS, RAW)                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(const __grid_constant__ Args a) {                 \
        gather<W, ROWS, RAW>(a, InPlace<Args>{a}, grid_span<W>(a.items));                                          \
    }

#define GATHER_PEER(NAME, W, ROWS, RAW)                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                        \
        NAME(const __grid_constant__ Args a, const __grid_constant__ Shards shards) {                        \
        gather<W, ROWS, RAW>(a, Peers{a, shards}, grid_span<W>(a.items));                                    \
    }

GATHER(gather_bf16_w8_r1, 8, 1, false)
GATHER(gather_bf16_w8_r2, 8, 2, false)
GATHER(gather_bf16_w16_r1, 16, 1, false)
GATHER(gather_raw_w8_r1, 8, 1, true)
GATHER(gather_raw_w8_r2, 8, 2, true)
GATHER_PEER(gather_peer_bf16_w8_r1, 8, 1, false)
GATHER_PEER(gather_peer_bf16_w8_r2, 8, 2, false)
GATHER_PEER(gather_peer_raw_w8_r1, 8, 1, true)
GATHER_PEER(gather_peer_raw_w8_r2, 8, 2, true)

// Counts the invalid ids of table 0, a thread an id.
__device__ __forceinline__ void judge(const Args1& a) {
    for (u32 item = blockIdx.x * blockDim.x + threadIdx.x; item < a.items; item += gridDim.x * blockDim.x) {
        const Wanted wanted = wanted_at(a, 0, item);
        check_unread(a, wanted, row_of(a, wanted));
    }
}

// Judges the ids too: no rank has looked at those of all columns before.
extern "C" __global__ void __launch_bounds__(256) dequantise_exchanged(const __grid_constant__ Args1 a) {
    gather<8, 4, false>(a, Exchanged{a}, grid_span<8>(a.items));
    judge(a);
}

extern "C" __global__ void __launch_bounds__(256) count_invalid(const __grid_constant__ Args1 a) { judge(a); }
