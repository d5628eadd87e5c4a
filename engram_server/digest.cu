// XXH3-128 (seed 0, default secret) of pieces of a planar segment, a warp a piece: its values, then its scales.
//
// The algorithm is a chain over blocks of 1,024 bytes, 16 stripes of 64 bytes. What the stripes of a block add
// to the eight accumulators depends on nothing before it; only the scramble at a block's end does. So the warp
// adds up whole blocks in parallel: thread t has the 16 bytes of accumulators 2*(t%4) and 2*(t%4)+1 in stripes
// t/4 and t/4 + 8. Three exchanges give every thread the sums of its two accumulators, and all eight threads of
// a pair take the same scramble. The loads of the next blocks are under way meanwhile.
//
// A piece has at least one row, 264 bytes, so the rules for inputs up to 240 bytes are not needed. Values are
// 16-byte aligned, scales 8-byte. Compiled by NVRTC without any header, for sm_80 and later; tests compile it
// for the CPU with a header that runs a warp's threads in turns.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP = 32;
constexpr u32 ALL = 0xffffffffu;
constexpr u32 ROW_VALUE_WORDS = 32;
constexpr u32 ROW_WORDS = 33;
constexpr u32 STRIPE_WORDS = 8;
constexpr u32 BLOCK_STRIPES = 16;
constexpr u32 BLOCK_WORDS = STRIPE_WORDS * BLOCK_STRIPES;
constexpr u32 BATCH = 8; // blocks whose loads are in flight at a time, 8 KiB a warp

constexpr u64 PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr u64 PRIME64_1 = 0x9E3779B185EBCA87ull, PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
constexpr u64 PRIME64_3 = 0x165667B19E3779F9ull, PRIME64_4 = 0x85EBCA77C2B2AE63ull;
constexpr u64 PRIME64_5 = 0x27D4EB2F165667C5ull, PRIME_MX1 = 0x165667919E3779F9ull;

// Offsets into the secret, in bytes
constexpr u32 SCRAMBLE_AT = 128, LAST_STRIPE_AT = 121, LOW_AT = 11, HIGH_AT = 117;

__constant__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};
__constant__ const u64 START[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

struct Piece {
    const u64* values;
    const u64* scales;
    u64 rows;
};

struct Digest {
    u64 low, high;
};

// Two neighbouring words of a stripe, and what belongs to their two accumulators
struct Pair {
    u64 even, odd;
};

__device__ __forceinline__ u64 secret_at(u32 offset) {
    const u32 word = offset / 8, shift = offset % 8 * 8;
    return shift ? SECRET[word] >> shift | SECRET[word + 1] << (64 - shift) : SECRET[word];
}

__device__ __forceinline__ Pair secret_pair(u32 offset) { return {secret_at(offset), secret_at(offset + 8)}; }

__device__ __forceinline__ void accumulate(Pair& sum, Pair data, Pair key) {
    const u64 even = data.even ^ key.even, odd = data.odd ^ key.odd;
    sum.even += data.odd + u64(u32(even)) * (even >> 32);
    sum.odd += data.even + u64(u32(odd)) * (odd >> 32);
}

__device__ __forceinline__ u64 scrambled(u64 word, u64 key) { return (word ^ word >> 47 ^ key) * PRIME32_1; }

__device__ __forceinline__ u64 folded_product(u64 a, u64 b) { return a * b ^ __umul64hi(a, b); }

__device__ __forceinline__ u64 avalanche(u64 word) {
    word = (word ^ word >> 37) * PRIME_MX1;
    return word ^ word >> 32;
}

// The sum over the threads that differ in the given bits of their number
template <u32 FIRST, u32 LAST> __device__ __forceinline__ u64 summed(u64 word) {
#pragma unroll
    for (u32 bit = FIRST; bit <= LAST; bit *= 2) word += __shfl_xor_sync(ALL, word, bit);
    return word;
}

__device__ __forceinline__ Pair summed_over_stripes(Pair sum) {
    return {summed<4, 16>(sum.even), summed<4, 16>(sum.odd)};
}

// Where words come from; `word` counts from the piece's first, and is even.

struct Values {
    const u64* words;
    __device__ __forceinline__ Pair load(u64 word) const {
        const ulonglong2 both = __ldcs(reinterpret_cast<const ulonglong2*>(words + word));
        return {both.x, both.y};
    }
};

struct Scales {
    const u64* words;
    u64 first;
    __device__ __forceinline__ Pair load(u64 word) const {
        return {__ldcs(words + (word - first)), __ldcs(words + (word - first) + 1)};
    }
};

struct Either {
    const u64* values;
    const u64* scales;
    u64 first; // word of the scales
    __device__ __forceinline__ u64 one(u64 word) const { return word < first ? values[word] : scales[word - first]; }
    __device__ __forceinline__ Pair load(u64 word) const { return {one(word), one(word + 1)}; }
};

// This thread's share of a piece's state
struct Lane {
    u32 at;         // word of a stripe
    u32 stripe;     // and `stripe + 8`
    Pair keys[2];   // of these two stripes
    Pair scramble;
    Pair sum;       // the two accumulators

    __device__ __forceinline__ explicit Lane(u32 thread) : at(thread % 4 * 2), stripe(thread / 4) {
        for (u32 half = 0; half < 2; ++half) keys[half] = secret_pair((stripe + half * 8 + at) * 8);
        scramble = secret_pair(SCRAMBLE_AT + at * 8);
        sum = {START[at], START[at + 1]};
    }

    __device__ __forceinline__ u64 word(u64 block, u32 half) const {
        return block * BLOCK_WORDS + (stripe + half * 8) * STRIPE_WORDS + at;
    }

    __device__ __forceinline__ void add(Pair part) { sum.even += part.even, sum.odd += part.odd; }

    // Ends a block whose stripes add up to `part` over all threads
    __device__ __forceinline__ void finish(Pair part) {
        add(part);
        sum = {scrambled(sum.even, scramble.even), scrambled(sum.odd, scramble.odd)};
    }
};

template <class Source> __device__ __forceinline__ void one_block(Lane& lane, const Source& source, u64 block) {
    Pair part = {0, 0};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) accumulate(part, source.load(lane.word(block, half)), lane.keys[half]);
    lane.finish(summed_over_stripes(part));
}

template <class Source>
__device__ __forceinline__ void load_batch(Pair (&data)[BATCH][2], const Lane& lane, const Source& source, u64 block) {
#pragma unroll
    for (u32 k = 0; k < BATCH; ++k)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) data[k][half] = source.load(lane.word(block + k, half));
}

// Blocks [block, stop), all of them in `source`
template <class Source> __device__ __forceinline__ void blocks(Lane& lane, const Source& source, u64 block, u64 stop) {
    if (block + BATCH <= stop) {
        Pair data[BATCH][2], next[BATCH][2];
        load_batch(data, lane, source, block);
        while (true) {
            // The last round loads its own blocks again: a branch around the loads would hold them back.
            const u64 following = block + 2 * BATCH <= stop ? block + BATCH : block;
            load_batch(next, lane, source, following);
            Pair part[BATCH];
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) {
                part[k] = {0, 0};
#pragma unroll
                for (u32 half = 0; half < 2; ++half) accumulate(part[k], data[k][half], lane.keys[half]);
            }
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) part[k] = summed_over_stripes(part[k]);
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k) lane.finish(part[k]);
            block += BATCH;
            if (block + BATCH > stop) break;
#pragma unroll
            for (u32 k = 0; k < BATCH; ++k)
#pragma unroll
                for (u32 half = 0; half < 2; ++half) data[k][half] = next[k][half];
        }
    }
    for (; block < stop; ++block) one_block(lane, source, block);
}

// The last 1 to 1,024 bytes: its stripes but the last, and then the last 64 bytes of the piece
__device__ __forceinline__ void last_block(Lane& lane, const Either& source, u64 block, u64 words) {
    const u32 stripes = u32((words - block * BLOCK_WORDS - 1) / STRIPE_WORDS);
    Pair part = {0, 0};
    for (u32 half = 0; half < 2; ++half)
        if (lane.stripe + half * 8 < stripes) accumulate(part, source.load(lane.word(block, half)), lane.keys[half]);
    if (lane.stripe == 0)
        accumulate(part, source.load(words - STRIPE_WORDS + lane.at), secret_pair(LAST_STRIPE_AT + lane.at * 8));
    lane.add(summed_over_stripes(part));
}

__device__ __forceinline__ u64 merged(const Lane& lane, u64 start, u32 secret) {
    const Pair key = secret_pair(secret + lane.at * 8);
    return avalanche(start + summed<1, 2>(folded_product(lane.sum.even ^ key.even, lane.sum.odd ^ key.odd)));
}

// Grid: [pieces], a warp a block. `pieces` and `digests` may be host memory: each is touched once.
extern "C" __global__ void __launch_bounds__(WARP) digest_pieces(const Piece* pieces, Digest* digests) {
    const Piece piece = pieces[blockIdx.x];
    const u64 words = piece.rows * ROW_WORDS, first_scale = piece.rows * ROW_VALUE_WORDS;
    const Either either = {piece.values, piece.scales, first_scale};
    const u64 scrambles = (words - 1) / BLOCK_WORDS, of_values = first_scale / BLOCK_WORDS;
    Lane lane(threadIdx.x);
    blocks(lane, Values{piece.values}, 0, of_values);
    u64 block = of_values;
    if (first_scale % BLOCK_WORDS && block < scrambles) one_block(lane, either, block++);
    blocks(lane, Scales{piece.scales, first_scale}, block, scrambles);
    last_block(lane, either, scrambles, words);
    const u64 nbytes = words * 8;
    const Digest digest = {merged(lane, nbytes * PRIME64_1, LOW_AT), merged(lane, ~(nbytes * PRIME64_2), HIGH_AT)};
    if (threadIdx.x == 0) digests[blockIdx.x] = digest;
}
