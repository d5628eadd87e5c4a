/* The loop of engram_server/device_pump.py: from a file in the page cache through small pieces of pinned memory
   to a GPU. Small, because what fits a core's cache is read much faster, and the GPU then fetches it from there;
   hence here, without the interpreter lock, which 16 threads with a piece every 20 microseconds would wait for.

   Nothing of CUDA is needed to build this: its two calls come as addresses. The stable ABI, as in
   engram_client/_native.c. */

#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* first: it asks the C library for its 64-bit offsets and for pread */

#include <errno.h>
#include <stdint.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "offsets of files need 64 bits");

/* cuMemcpyHtoDAsync_v2 and cuStreamSynchronize as they are on Linux; both return a CUresult, 0 for success. */
typedef int (*Copy)(unsigned long long target, const void *source, size_t nbytes, void *stream);
typedef int (*Wait)(void *stream);

enum { MOST_SLOTS = 64 };

typedef struct {
    void *memory;
    void *stream;
} Slot;

typedef struct {
    int fd;
    uint64_t at, end; /* in the file */
    uint64_t target;  /* of `at` */
    Slot slots[MOST_SLOTS];
    unsigned slot_count;
    uint64_t slot_bytes;
    Copy copy; /* NULL: nothing is copied, and nothing waited for */
    Wait wait;
} Work;

/* Fills `memory` from `work->at` on, which stays where it was on success and else says where it ended. Returns
   NULL, or what went wrong. */
static const char *read_piece(Work *work, char *memory, uint64_t nbytes, int *code)
{
    for (uint64_t filled = 0; filled < nbytes;) {
        ssize_t count = pread(work->fd, memory + filled, nbytes - filled, (off_t)(work->at + filled));
        if (count > 0) {
            filled += (uint64_t)count;
        } else if (count == 0 || errno != EINTR) {
            *code = count ? errno : 0;
            work->at += filled;
            return count ? "read" : "end";
        }
    }
    return NULL;
}

static const char *pump(Work *work, int *code)
{
    for (unsigned turn = 0; work->at < work->end; turn = (turn + 1) % work->slot_count) {
        const Slot *slot = &work->slots[turn];
        /* Pieces end at multiples of their size in the file: whole pages, to where a page begins. */
        uint64_t nbytes = work->slot_bytes - work->at % work->slot_bytes;
        if (nbytes > work->end - work->at)
            nbytes = work->end - work->at;
        if (work->copy && (*code = work->wait(slot->stream)))
            return "wait";
        const char *wrong = read_piece(work, slot->memory, nbytes, code);
        if (wrong)
            return wrong;
        if (work->copy && (*code = work->copy(work->target, slot->memory, nbytes, slot->stream)))
            return "copy";
        work->at += nbytes;
        work->target += nbytes;
    }
    return "done";
}

/* Item `index` of a tuple of addresses; false with an exception set. */
static int address_at(PyObject *tuple, Py_ssize_t index, void **address)
{
    PyObject *item = PyTuple_GetItem(tuple, index);
    unsigned long long number = item ? PyLong_AsUnsignedLongLong(item) : 0;
    if (PyErr_Occurred())
        return 0;
    *address = (void *)(uintptr_t)number;
    return 1;
}

static int take_slots(Work *work, PyObject *memories, PyObject *streams)
{
    Py_ssize_t count = PyTuple_Size(memories);
    if (count < 1 || count > MOST_SLOTS || PyTuple_Size(streams) != count) {
        PyErr_Format(PyExc_ValueError, "1 to %d slots are needed, and a stream for each", MOST_SLOTS);
        return 0;
    }
    work->slot_count = (unsigned)count;
    for (Py_ssize_t index = 0; index < count; index++)
        if (!address_at(memories, index, &work->slots[index].memory) ||
            !address_at(streams, index, &work->slots[index].stream))
            return 0;
    return 1;
}

static PyObject *py_pump(PyObject *self, PyObject *args)
{
    long long offset, nbytes, slot_bytes;
    unsigned long long target, copy, wait;
    PyObject *memories, *streams;
    Work work;
    const char *outcome;
    int code = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLLKO!LO!KK:pump", &work.fd, &offset, &nbytes, &target, &PyTuple_Type, &memories,
                          &slot_bytes, &PyTuple_Type, &streams, &copy, &wait))
        return NULL;
    if (offset < 0 || nbytes < 0 || nbytes > INT64_MAX - offset || slot_bytes < 1 || !copy != !wait) {
        PyErr_SetString(PyExc_ValueError, "a range of a file is needed, and both calls or none");
        return NULL;
    }
    if (!take_slots(&work, memories, streams))
        return NULL;
    work.at = (uint64_t)offset;
    work.end = (uint64_t)offset + (uint64_t)nbytes;
    work.target = target;
    work.slot_bytes = (uint64_t)slot_bytes;
    work.copy = (Copy)(uintptr_t)copy;
    work.wait = (Wait)(uintptr_t)wait;
    Py_BEGIN_ALLOW_THREADS
    outcome = pump(&work, &code);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("sKi", outcome, (unsigned long long)work.at, code);
}

static PyMethodDef methods[] = {
    {"pump", py_pump, METH_VARARGS,
     "pump(fd, offset, nbytes, target, slots, slot_bytes, streams, copy, wait): see engram_server/_pump.pyi"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot module_slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "engram_server._pump",
    .m_doc = "The loop of engram_server.device_pump in C.",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__pump(void)
{
    return PyModuleDef_Init(&definition);
}
