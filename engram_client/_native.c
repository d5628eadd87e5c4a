/* The operations of engram_client/rows.py in C; engram_client/_pure.py says the same in numpy.

   Portable C that compilers vectorise by themselves. On x86-64 with glibc the loops are compiled for several
   instruction sets and the loader picks one. The stable ABI: one build serves Python 3.11 and later. */

#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#define HAVE_STREAMING_STORES 1
#endif

/* Function versions are resolved by an ifunc, which musl does not have; GCC names the AVX-512 level since 12. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define VECTORISED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORISED
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

enum { VALUES = 256, SCALES = 8, GROUP = 32, ROW = VALUES + SCALES, LINE = 64 };

/* Rows copied out of the table before any of them is used; see gather_rows. */
enum { BLOCK = 32 };

#define BF16_NAN 0x7FC0
#define BF16_INFINITY 0x7F80

/* Scale bytes under which every product is a normal bfloat16 or 0: from 2^-9 * 2^(10 - 127) = 2^-126 to
   448 * 2^(246 - 127) < 2^128. */
#define SCALE_FIRST_NORMAL 10
#define SCALE_LAST_NORMAL 246

/* bfloat16 bits of every code under every scale byte. */
static uint16_t table[256][256];

/* Integers only: a host process may have switched on flush-to-zero. */
static uint16_t product(unsigned code, unsigned scale)
{
    unsigned exponent = code >> 3 & 15, mantissa = code & 7, bits;
    if (scale == 255 || (code & 0x7F) == 0x7F)
        return BF16_NAN;
    unsigned significand = exponent ? 8 + mantissa : mantissa;
    if (!significand)
        return 0;
    /* The product is significand * 2^power. */
    int power = (exponent ? (int)exponent : 1) - 10 + (int)scale - 127, top = 3;
    while (!(significand >> top))
        top--;
    if (power + top > 127)
        bits = BF16_INFINITY;
    else if (power + top >= -126)
        bits = ((unsigned)(power + top + 127) << 7) | ((significand << (7 - top)) & 0x7F);
    else if (power >= -133)
        bits = significand << (power + 133);
    else {
        int drop = -133 - power;
        unsigned half = 1u << (drop - 1), rest = significand & ((1u << drop) - 1);
        bits = significand >> drop;
        bits += rest > half || (rest == half && (bits & 1));
    }
    return (uint16_t)(bits && code & 0x80 ? bits | 0x8000 : bits);
}

static void fill_table(void)
{
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned code = 0; code < 256; code++)
            table[scale][code] = product(code, scale);
}

/* One code under a scale byte from SCALE_FIRST_NORMAL to SCALE_LAST_NORMAL; exponents are added as integers.
   16-bit lanes without a branch, so that compilers make vectors of it. */
INLINE uint16_t product_normal(uint8_t code, uint16_t shift)
{
    uint16_t magnitude = code & 0x7F;
    uint16_t normal = (uint16_t)((magnitude << 4) + (120 << 7));
    /* E4M3's subnormals, k * 2^-9, are normal in bfloat16. */
    uint16_t from_4 = (uint16_t)((120 << 7) | (magnitude & 3) << 5);
    uint16_t from_2 = (uint16_t)((119 << 7) | (magnitude & 1) << 6);
    uint16_t small = magnitude >= 4 ? from_4 : magnitude >= 2 ? from_2 : (uint16_t)(118 << 7);
    uint16_t bits = magnitude >= 8 ? normal : small;
    bits = (uint16_t)((uint16_t)(bits + shift) | (code & 0x80) << 8);
    bits = magnitude == 0 ? 0 : bits;
    return magnitude == 0x7F ? BF16_NAN : bits;
}

INLINE void dequantise_row(const uint8_t *restrict values, const uint8_t *restrict scales, uint16_t *restrict out)
{
    for (int group = 0; group < SCALES; group++, values += GROUP, out += GROUP) {
        unsigned scale = scales[group];
        if (scale >= SCALE_FIRST_NORMAL && scale <= SCALE_LAST_NORMAL) {
            uint16_t shift = (uint16_t)((scale - 127) << 7);
            for (int k = 0; k < GROUP; k++)
                out[k] = product_normal(values[k], shift);
        } else {
            const uint16_t *entries = table[scale];
            for (int k = 0; k < GROUP; k++)
                out[k] = entries[values[k]];
        }
    }
}

/* Streaming stores skip reading the target's lines and leave the caches to the source: the load fills a huge
   mapping from buffers that fit a cache. Measured on an AMD EPYC (Zen 4): about 20 GB/s a thread, 14 without. They
   gain nothing in gather_rows, which waits for reads. */

#ifdef HAVE_STREAMING_STORES
INLINE void stream_lines(void *to, const void *from, size_t size)
{
    for (size_t at = 0; at < size; at += 16)
        _mm_stream_si128((__m128i *)((char *)to + at), _mm_load_si128((const __m128i *)((const char *)from + at)));
}
#define stream_end() _mm_sfence()
#define CAN_STREAM(address) (((uintptr_t)(address) & (LINE - 1)) == 0)
#else
INLINE void stream_lines(void *to, const void *from, size_t size) { memcpy(to, from, size); }
#define stream_end() ((void)0)
#define CAN_STREAM(address) 0
#endif

static void pack_rows(const char *values, const char *scales, char *packed, Py_ssize_t rows)
{
    /* Eight rows are 33 whole cache lines; a row is 8 bytes past a whole number of lines, so that at most seven
       rows lie before a border of lines (if the target is a multiple of 8). */
    _Alignas(LINE) char lines[8 * ROW];
    Py_ssize_t row = 0;
    while (row < rows) {
        char *to = packed + row * ROW;
        if (rows - row >= 8 && CAN_STREAM(to)) {
            for (int k = 0; k < 8; k++) {
                memcpy(lines + k * ROW, values + (row + k) * VALUES, VALUES);
                memcpy(lines + k * ROW + VALUES, scales + (row + k) * SCALES, SCALES);
            }
            stream_lines(to, lines, sizeof lines);
            row += 8;
        } else {
            memcpy(to, values + row * VALUES, VALUES);
            memcpy(to + VALUES, scales + row * SCALES, SCALES);
            row++;
        }
    }
    stream_end();
}

static void unpack_rows(const char *packed, char *values, char *scales, Py_ssize_t rows)
{
    for (Py_ssize_t row = 0; row < rows; row++) {
        memcpy(values + row * VALUES, packed + row * ROW, VALUES);
        memcpy(scales + row * SCALES, packed + row * ROW + VALUES, SCALES);
    }
}

VECTORISED static void dequantise_rows(const uint8_t *packed, uint16_t *out, Py_ssize_t rows)
{
    for (Py_ssize_t row = 0; row < rows; row++)
        dequantise_row(packed + row * ROW, packed + row * ROW + VALUES, out + row * VALUES);
}

typedef struct {
    const char *items;
    Py_ssize_t rows, columns, row_stride, column_stride;
    int is_64_bit;
    int64_t table_rows;
    const int64_t *column_starts; /* NULL: ids may name any row */
} Ids;

typedef struct {
    Py_ssize_t count;
    int64_t first;
    Py_ssize_t position;
} Offence;

/* The table row that ids[row, column] names, or -1. */
INLINE int64_t judge(const Ids *ids, Py_ssize_t row, Py_ssize_t column, Offence *offence)
{
    const char *item = ids->items + row * ids->row_stride + column * ids->column_stride;
    int64_t id, start = 0, stop = ids->table_rows;
    if (ids->is_64_bit)
        memcpy(&id, item, 8);
    else {
        int32_t narrow;
        memcpy(&narrow, item, 4);
        id = narrow;
    }
    if (ids->column_starts) {
        start = ids->column_starts[column];
        stop = ids->column_starts[column + 1];
    }
    if (id >= start && id < stop)
        return id;
    if (id > 0) {
        if (!offence->count++) {
            offence->first = id;
            offence->position = row * ids->columns + column;
        }
    }
    return -1;
}

static void count_ids(const Ids *ids, Offence *offence)
{
    for (Py_ssize_t row = 0; row < ids->rows; row++)
        for (Py_ssize_t column = 0; column < ids->columns; column++)
            judge(ids, row, column, offence);
}

typedef struct {
    const uint8_t *values, *scales;
    Py_ssize_t value_stride, scale_stride;
    int64_t row_start, row_stop;
} Stored;

INLINE void read_row(const Stored *stored, int64_t row, uint8_t *to)
{
    if (row < 0)
        memset(to, 0, ROW);
    else {
        memcpy(to, stored->values + row * stored->value_stride, VALUES);
        memcpy(to + VALUES, stored->scales + row * stored->scale_stride, SCALES);
    }
}

/* Rows lie at random places of a table far larger than any cache. Copying one takes so few instructions that a
   core has many copies under way at once, each waiting for its own cache and TLB misses; with the dequantising
   in between it has one. So a block of rows is copied first, into the L1 cache. Measured on an AMD EPYC (Zen 4),
   8192 x 24 rows of 1 GiB: 27 ms a thread, 60 ms row by row, with prefetch instructions or without. */
VECTORISED static void gather_rows(const Stored *stored, const Ids *ids, char *out, int raw, Offence *offence)
{
    int64_t named[BLOCK];
    _Alignas(LINE) uint8_t block[BLOCK * ROW];
    Py_ssize_t total = ids->rows * ids->columns, row = 0, column = 0;
    for (Py_ssize_t done = 0; done < total; done += BLOCK) {
        int count = total - done < BLOCK ? (int)(total - done) : BLOCK;
        for (int k = 0; k < count; k++) {
            int64_t id = judge(ids, row, column, offence);
            named[k] = id >= stored->row_start && id < stored->row_stop ? id - stored->row_start : -1;
            if (++column == ids->columns) {
                column = 0;
                row++;
            }
        }
        uint8_t *to = raw ? (uint8_t *)out + done * ROW : block;
        for (int k = 0; k < count; k++)
            read_row(stored, named[k], to + k * ROW);
        if (!raw)
            for (int k = 0; k < count; k++)
                dequantise_row(block + k * ROW, block + k * ROW + VALUES, (uint16_t *)out + (done + k) * VALUES);
    }
}

/* Rows of a made table; engram_server/generate.py has the formula. */

#define GAMMA 0x9E3779B97F4A7C15u
#define EVERY_BYTE 0x0101010101010101u
enum { WORDS = ROW / 8 };

INLINE uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

INLINE uint64_t little_endian(uint64_t word)
{
#if PY_LITTLE_ENDIAN
    return word;
#else
    return __builtin_bswap64(word);
#endif
}

VECTORISED static void make_rows(uint64_t key, uint64_t first, int every_code, uint8_t *values, uint8_t *scales,
                                 Py_ssize_t rows)
{
    for (Py_ssize_t index = 0; index < rows; index++, values += VALUES, scales += SCALES) {
        uint64_t row = first + (uint64_t)index, words[WORDS];
        for (int w = 0; w < WORDS; w++)
            words[w] = mix(key + (WORDS * row + (uint64_t)w + 1) * GAMMA);
        if (!every_code)
            /* Adding one to seven set bits sets the eighth just then, and never carries into the next byte. */
            for (int w = 0; w < WORDS - 1; w++)
                words[w] ^= ((words[w] & 0x7F * EVERY_BYTE) + EVERY_BYTE) >> 7 & EVERY_BYTE;
        for (int w = 0; w < WORDS; w++)
            words[w] = little_endian(words[w]);
        memcpy(values, words, VALUES);
        memcpy(scales, words + WORDS - 1, SCALES);
        if (every_code)
            values[0] = scales[0] = (uint8_t)row;
        else
            for (int k = 0; k < SCALES; k++)
                scales[k] = (uint8_t)(118 + (13 * scales[k] >> 8));
    }
}

/* Python's side: buffers are taken, measured, worked on without the GIL, and given back. */

#define MAX_BUFFERS 4

typedef struct {
    Py_buffer view[MAX_BUFFERS];
    int count;
} Buffers;

static Py_buffer *take(Buffers *buffers, PyObject *object, int flags)
{
    Py_buffer *view = &buffers->view[buffers->count];
    if (PyObject_GetBuffer(object, view, flags))
        return NULL;
    buffers->count++;
    return view;
}

static PyObject *give_back(Buffers *buffers, PyObject *result)
{
    while (buffers->count)
        PyBuffer_Release(&buffers->view[--buffers->count]);
    return result;
}

static PyObject *none(void)
{
    Py_INCREF(Py_None);
    return Py_None;
}

static int demand(const Py_buffer *view, Py_ssize_t expected, const char *what)
{
    if (view->len == expected)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %zd", what, view->len, expected);
    return 0;
}

static int demand_multiple(const Py_buffer *view, Py_ssize_t row_bytes, const char *what)
{
    if (view->len % row_bytes == 0)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes, no multiple of %zd", what, view->len, row_bytes);
    return 0;
}

static int demand_bf16(const Py_buffer *out)
{
    if ((uintptr_t)out->buf % 2 == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "out must be aligned to 2 bytes");
    return 0;
}

static PyObject *py_pack(PyObject *self, PyObject *args)
{
    PyObject *values_object, *scales_object, *packed_object;
    Buffers buffers = {.count = 0};
    Py_buffer *values, *scales, *packed;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO:pack", &values_object, &scales_object, &packed_object))
        return NULL;
    if (!(values = take(&buffers, values_object, PyBUF_SIMPLE)) ||
        !(scales = take(&buffers, scales_object, PyBUF_SIMPLE)) ||
        !(packed = take(&buffers, packed_object, PyBUF_WRITABLE)) || !demand_multiple(values, VALUES, "values"))
        return give_back(&buffers, NULL);
    Py_ssize_t rows = values->len / VALUES;
    if (!demand(scales, rows * SCALES, "scales") || !demand(packed, rows * ROW, "packed"))
        return give_back(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    pack_rows(values->buf, scales->buf, packed->buf, rows);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, none());
}

static PyObject *py_unpack(PyObject *self, PyObject *args)
{
    PyObject *packed_object, *values_object, *scales_object;
    Buffers buffers = {.count = 0};
    Py_buffer *packed, *values, *scales;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO:unpack", &packed_object, &values_object, &scales_object))
        return NULL;
    if (!(packed = take(&buffers, packed_object, PyBUF_SIMPLE)) ||
        !(values = take(&buffers, values_object, PyBUF_WRITABLE)) ||
        !(scales = take(&buffers, scales_object, PyBUF_WRITABLE)) || !demand_multiple(packed, ROW, "packed"))
        return give_back(&buffers, NULL);
    Py_ssize_t rows = packed->len / ROW;
    if (!demand(values, rows * VALUES, "values") || !demand(scales, rows * SCALES, "scales"))
        return give_back(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    unpack_rows(packed->buf, values->buf, scales->buf, rows);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, none());
}

static PyObject *py_dequantise(PyObject *self, PyObject *args)
{
    PyObject *packed_object, *out_object;
    Buffers buffers = {.count = 0};
    Py_buffer *packed, *out;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO:dequantise", &packed_object, &out_object))
        return NULL;
    if (!(packed = take(&buffers, packed_object, PyBUF_SIMPLE)) ||
        !(out = take(&buffers, out_object, PyBUF_WRITABLE)) || !demand_multiple(packed, ROW, "packed_rows") ||
        !demand(out, packed->len / ROW * VALUES * 2, "out") || !demand_bf16(out))
        return give_back(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    dequantise_rows(packed->buf, out->buf, packed->len / ROW);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, none());
}

/* Fills ids from a 2-D buffer of signed 32 or 64 bit integers, and column_starts from None or int64 bytes. */
static int take_ids(Buffers *buffers, PyObject *ids_object, PyObject *starts_object, Ids *ids)
{
    Py_buffer *view = take(buffers, ids_object, PyBUF_STRIDED_RO | PyBUF_FORMAT), *starts;
    if (!view)
        return 0;
    const char *format = view->format ? view->format : "B";
    if (*format == '@' || *format == '=' || (*format == '<' && PY_LITTLE_ENDIAN))
        format++;
    if (view->ndim != 2 || !*format || !strchr("ilq", *format) || format[1] ||
        (view->itemsize != 4 && view->itemsize != 8)) {
        PyErr_SetString(PyExc_ValueError, "ids must be 2-D, int32 or int64");
        return 0;
    }
    ids->items = view->buf;
    ids->rows = view->shape[0];
    ids->columns = view->shape[1];
    ids->row_stride = view->strides[0];
    ids->column_stride = view->strides[1];
    ids->is_64_bit = view->itemsize == 8;
    ids->column_starts = NULL;
    if (ids->columns == 0) /* so that loops over rows end at once */
        ids->rows = 0;
    if (starts_object == Py_None)
        return 1;
    if (!(starts = take(buffers, starts_object, PyBUF_SIMPLE)) ||
        !demand(starts, (view->shape[1] + 1) * 8, "column_starts"))
        return 0;
    if ((uintptr_t)starts->buf % 8) {
        PyErr_SetString(PyExc_ValueError, "column_starts must be aligned to 8 bytes");
        return 0;
    }
    ids->column_starts = starts->buf;
    return 1;
}

static PyObject *offence_result(const Offence *offence)
{
    return Py_BuildValue("nLn", offence->count, (long long)offence->first, offence->position);
}

static PyObject *py_count_invalid(PyObject *self, PyObject *args)
{
    PyObject *ids_object, *starts_object;
    long long table_rows;
    Buffers buffers = {.count = 0};
    Ids ids;
    Offence offence = {0, 0, -1};
    (void)self;
    if (!PyArg_ParseTuple(args, "OLO:count_invalid", &ids_object, &table_rows, &starts_object))
        return NULL;
    if (!take_ids(&buffers, ids_object, starts_object, &ids))
        return give_back(&buffers, NULL);
    ids.table_rows = table_rows;
    Py_BEGIN_ALLOW_THREADS
    count_ids(&ids, &offence);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, offence_result(&offence));
}

static PyObject *py_gather(PyObject *self, PyObject *args)
{
    PyObject *segment_object, *starts_object, *ids_object, *out_object;
    int packed, raw;
    long long row_start, row_stop, table_rows;
    Buffers buffers = {.count = 0};
    Py_buffer *segment, *out;
    Ids ids;
    Offence offence = {0, 0, -1};
    (void)self;
    if (!PyArg_ParseTuple(args, "OpLLLOOOp:gather", &segment_object, &packed, &row_start, &row_stop, &table_rows,
                          &starts_object, &ids_object, &out_object, &raw))
        return NULL;
    if (!(segment = take(&buffers, segment_object, PyBUF_SIMPLE)) ||
        !(out = take(&buffers, out_object, PyBUF_WRITABLE)))
        return give_back(&buffers, NULL);
    if (row_start < 0 || row_start > row_stop || row_stop > table_rows) {
        PyErr_Format(PyExc_ValueError, "rows %lld to %lld are not in a table of %lld", row_start, row_stop, table_rows);
        return give_back(&buffers, NULL);
    }
    int64_t shard_rows = row_stop - row_start;
    if (segment->len / ROW < shard_rows) {
        PyErr_Format(PyExc_ValueError, "segment has %zd bytes, too few for %lld rows", segment->len,
                     (long long)shard_rows);
        return give_back(&buffers, NULL);
    }
    if (!take_ids(&buffers, ids_object, starts_object, &ids) ||
        !demand(out, ids.rows * ids.columns * (raw ? ROW : 2 * VALUES), "out") || (!raw && !demand_bf16(out)))
        return give_back(&buffers, NULL);
    ids.table_rows = table_rows;
    const uint8_t *base = segment->buf;
    Stored stored = {
        .values = base,
        .scales = base + (packed ? VALUES : shard_rows * VALUES),
        .value_stride = packed ? ROW : VALUES,
        .scale_stride = packed ? ROW : SCALES,
        .row_start = row_start,
        .row_stop = row_stop,
    };
    Py_BEGIN_ALLOW_THREADS
    gather_rows(&stored, &ids, out->buf, raw, &offence);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, offence_result(&offence));
}

static PyObject *py_make(PyObject *self, PyObject *args)
{
    PyObject *values_object, *scales_object;
    unsigned long long key, row_start;
    int every_code;
    Buffers buffers = {.count = 0};
    Py_buffer *values, *scales;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKpOO:make", &key, &row_start, &every_code, &values_object, &scales_object))
        return NULL;
    if (!(values = take(&buffers, values_object, PyBUF_WRITABLE)) ||
        !(scales = take(&buffers, scales_object, PyBUF_WRITABLE)) || !demand_multiple(values, VALUES, "values"))
        return give_back(&buffers, NULL);
    Py_ssize_t rows = values->len / VALUES;
    if (!demand(scales, rows * SCALES, "scales"))
        return give_back(&buffers, NULL);
    Py_BEGIN_ALLOW_THREADS
    make_rows(key, row_start, every_code, values->buf, scales->buf, rows);
    Py_END_ALLOW_THREADS
    return give_back(&buffers, none());
}

static PyMethodDef methods[] = {
    {"pack", py_pack, METH_VARARGS, "pack(values, scales, packed): see engram_client.rows"},
    {"unpack", py_unpack, METH_VARARGS, "unpack(packed, values, scales): see engram_client.rows"},
    {"dequantise", py_dequantise, METH_VARARGS, "dequantise(packed_rows, out): see engram_client.rows"},
    {"count_invalid", py_count_invalid, METH_VARARGS,
     "count_invalid(ids, table_rows, column_starts): see engram_client.rows"},
    {"gather", py_gather, METH_VARARGS,
     "gather(segment, packed, row_start, row_stop, table_rows, column_starts, ids, out, raw): see "
     "engram_client.rows"},
    {"make", py_make, METH_VARARGS, "make(key, row_start, every_code, values, scales): see engram_client.rows"},
    {NULL, NULL, 0, NULL},
};

static int set_up(PyObject *module)
{
    (void)module;
    fill_table();
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, set_up}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "engram_client._native",
    .m_doc = "The operations of engram_client.rows in C.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
