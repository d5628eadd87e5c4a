/* For LD_PRELOAD: pread as a bad day gives it, for the file of SHIM_PATH alone. At most SHIM_MOST bytes a call; every
   SHIM_EINTR-th call is interrupted; EIO once SHIM_EIO bytes have been read. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static size_t number(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static ssize_t spoiled(const char *name, int fd, void *buffer, size_t nbytes, off_t offset)
{
    static size_t calls, given;
    ssize_t (*real)(int, void *, size_t, off_t) = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, name);
    struct stat mine, other;
    const char *path = getenv("SHIM_PATH");
    if (!path || stat(path, &mine) || fstat(fd, &other) || mine.st_ino != other.st_ino || mine.st_dev != other.st_dev)
        return real(fd, buffer, nbytes, offset);
    if (++calls % number("SHIM_EINTR", (size_t)-1) == 0) {
        errno = EINTR;
        return -1;
    }
    size_t most = number("SHIM_MOST", nbytes), left = number("SHIM_EIO", (size_t)-1) - given;
    if (!left) {
        errno = EIO;
        return -1;
    }
    nbytes = nbytes < most ? nbytes : most;
    ssize_t count = real(fd, buffer, nbytes < left ? nbytes : left, offset);
    given += count > 0 ? (size_t)count : 0;
    return count;
}

ssize_t pread(int fd, void *buffer, size_t nbytes, off_t offset)
{
    return spoiled("pread", fd, buffer, nbytes, offset);
}

ssize_t pread64(int fd, void *buffer, size_t nbytes, off_t offset)
{
    return spoiled("pread64", fd, buffer, nbytes, offset);
}
