/* The loop of engram_server/device_pump.py: from a file in the page cache through small pieces of pinned memory
   to a GPU. Small, so that all of them stay in the processor's caches between the read and the GPU's fetch; hence
   here, without the interpreter lock, which 16 threads that together move a piece every 20 microseconds would wait for.

   The driver is asked as little as can be: all threads of a process wait for one lock in it, and cuStreamSynchronize
   for each piece cost a tenth of the link's rate. So after each copy the GPU itself writes into pinned memory that the
   piece is free again.

   Nothing of CUDA is needed to build this: its calls come as addresses. The stable ABI, as in
   engram_client/_native.c. */

#if !defined(Py_GIL_DISABLED) && !defined(Py_LIMITED_API)
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* first: it asks the C library for its 64-bit offsets and for pread */

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(off_t) == 8, "offsets of files need 64 bits");

/* cuMemcpyHtoDAsync_v2, cuStreamWriteValue32_v2 and cuStreamQuery as they are on Linux; all return a CUresult, 0 for
   success. */
typedef int (*Copy)(unsigned long long target, const void *source, size_t nbytes, void *stream);
typedef int (*Mark)(void *stream, unsigned long long address, unsigned value, unsigned flags);
typedef int (*Query)(void *stream);

enum {
    MOST_SLOTS = 64,
    NOT_READY = 600,     /* CUDA_ERROR_NOT_READY */
    TURNS_TO_LOOK = 256,  /* at the clock; and other threads get the core, for there may be too few of them */
    ASK_AFTER_NS = 500000 /* some 20 copies: of one that failed there is never a mark */
};

/* Of a slot, in pinned memory: how many of its copies the GPU says are done, and how many were started. The numbers go
   on from one call to the next. */
typedef struct {
    _Atomic uint32_t fetched;
    uint32_t sent;
} Tally;

_Static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(Tally) == 8, "the GPU writes 4 bytes");

typedef struct {
    void *memory;
    void *stream;
    Tally *tally;
    unsigned long long mark; /* where `tally` begins, for the GPU */
} Slot;

typedef struct {
    int fd;
    uint64_t at, end; /* in the file */
    uint64_t target;  /* of `at` */
    Slot slots[MOST_SLOTS];
    unsigned slot_count;
    uint64_t slot_bytes;
    Copy copy; /* NULL: nothing is copied, and nothing waited for */
    Mark mark;
    Query query;
} Work;

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int is_fetched(const Slot *slot)
{
    return atomic_load_explicit(&slot->tally->fetched, memory_order_acquire) == slot->tally->sent;
}

/* Until the slot may be overwritten. Returns 0, or the code of what failed on its stream or before. */
static int wait_until_fetched(const Work *work, const Slot *slot)
{
    int64_t asked = 0;
    for (unsigned turn = 0; !is_fetched(slot); turn++) {
        if (turn % TURNS_TO_LOOK) {
            relax();
            continue;
        }
        int64_t now = now_ns();
        if (!asked)
            asked = now;
        if (now - asked >= ASK_AFTER_NS) {
            int code = work->query(slot->stream);
            if (code != NOT_READY)
                return code; /* 0: all that was on the stream is done */
            asked = now;
        }
        sched_yield();
    }
    return 0;
}

/* Starts the copy of a full slot. Returns NULL, or what went wrong. */
static const char *send_piece(const Work *work, const Slot *slot, uint64_t nbytes, int *code)
{
    if ((*code = work->copy(work->target, slot->memory, nbytes, slot->stream)))
        return "copy";
    if ((*code = work->mark(slot->stream, slot->mark, ++slot->tally->sent, 0)))
        return "mark";
    return NULL;
}

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
        if (work->copy && (*code = wait_until_fetched(work, slot)))
            return "wait";
        const char *wrong = read_piece(work, slot->memory, nbytes, code);
        if (!wrong && work->copy)
            wrong = send_piece(work, slot, nbytes, code);
        if (wrong)
            return wrong;
        work->at += nbytes;
        work->target += nbytes;
    }
    return "done";
}

/* Takes a tuple of (memory, stream, tally, mark). False with an exception set. */
static int take_slot(Slot *slot, PyObject *item, int marked)
{
    unsigned long long numbers[4];
    if (!PyTuple_Check(item) || PyTuple_Size(item) != 4) {
        PyErr_SetString(PyExc_TypeError, "a slot is a tuple of four addresses");
        return 0;
    }
    for (Py_ssize_t k = 0; k < 4; k++) {
        numbers[k] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(item, k));
        if (PyErr_Occurred())
            return 0;
    }
    if (marked && (!numbers[2] || !numbers[3] || numbers[2] % _Alignof(Tally) || numbers[3] % 4)) {
        PyErr_SetString(PyExc_ValueError, "a tally is needed, where numbers of four bytes may be");
        return 0;
    }
    *slot = (Slot){(void *)(uintptr_t)numbers[0], (void *)(uintptr_t)numbers[1], (Tally *)(uintptr_t)numbers[2],
                   numbers[3]};
    return 1;
}

static int take_slots(Work *work, PyObject *slots)
{
    Py_ssize_t count = PyTuple_Size(slots);
    if (count < 1 || count > MOST_SLOTS) {
        PyErr_Format(PyExc_ValueError, "1 to %d slots are needed", MOST_SLOTS);
        return 0;
    }
    work->slot_count = (unsigned)count;
    for (Py_ssize_t index = 0; index < count; index++)
        if (!take_slot(&work->slots[index], PyTuple_GetItem(slots, index), work->copy != NULL))
            return 0;
    return 1;
}

static PyObject *py_pump(PyObject *self, PyObject *args)
{
    long long offset, nbytes, slot_bytes;
    unsigned long long target, copy, mark, query;
    PyObject *slots;
    Work work;
    const char *outcome;
    int code = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "iLLKO!LKKK:pump", &work.fd, &offset, &nbytes, &target, &PyTuple_Type, &slots,
                          &slot_bytes, &copy, &mark, &query))
        return NULL;
    if (offset < 0 || nbytes < 0 || nbytes > INT64_MAX - offset || slot_bytes < 1 || !copy != !mark ||
        !copy != !query) {
        PyErr_SetString(PyExc_ValueError, "a range of a file is needed, and all three calls or none");
        return NULL;
    }
    work.at = (uint64_t)offset;
    work.end = (uint64_t)offset + (uint64_t)nbytes;
    work.target = target;
    work.slot_bytes = (uint64_t)slot_bytes;
    work.copy = (Copy)(uintptr_t)copy;
    work.mark = (Mark)(uintptr_t)mark;
    work.query = (Query)(uintptr_t)query;
    if (!take_slots(&work, slots))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    outcome = pump(&work, &code);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("sKi", outcome, (unsigned long long)work.at, code);
}

static PyMethodDef methods[] = {
    {"pump", py_pump, METH_VARARGS,
     "pump(fd, offset, nbytes, target, slots, slot_bytes, copy, mark, query): see engram_server/_pump.pyi"},
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
