// Kills the program that preloads this at the n-th operation on a file whose path has a word. The
// file CHAOS_KILL_FILE names word, number and name of the fault; a write is cut in half before.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_here(const char *path, char *done) {
    static char last[64];
    static long count;
    char word[64], name[64], text[256] = "";
    long number;
    const char *control = getenv("CHAOS_KILL_FILE");
    int file = control ? (int)syscall(SYS_openat, AT_FDCWD, control, O_RDONLY) : -1;
    if (file < 0) return 0;
    long size = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    if (size <= 0 || sscanf(text, "%63s %ld %63s", word, &number, name) != 3) return 0;
    if (!strstr(path, word)) return 0;
    if (strcmp(name, last)) {
        strcpy(last, name);
        count = 0;
    }
    if (++count < number) return 0;
    snprintf(done, 512, "%s.done", control);
    return !syscall(SYS_unlink, control);  // one process only
}

static void end(const char *done, const char *operation, const char *path) {
    char text[1024];
    int length = snprintf(text, sizeof text, "%d %s %s", (int)getpid(), operation, path);
    int file = (int)syscall(SYS_openat, AT_FDCWD, done, O_WRONLY | O_CREAT, 0600);
    syscall(SYS_write, file, text, length);
    syscall(SYS_close, file);
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
}

static int is_here_by_number(int file, char *path, char *done) {
    char link[64];
    if (!getenv("CHAOS_KILL_FILE")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, 511);
    if (size <= 0 || path[0] != '/') return 0;
    path[size] = 0;
    return is_here(path, done);
}

ssize_t write(int file, const void *bytes, size_t size) {
    char path[512], done[512];
    if (is_here_by_number(file, path, done)) {
        syscall(SYS_write, file, bytes, size / 2);
        end(done, "write", path);
    }
    return syscall(SYS_write, file, bytes, size);
}

ssize_t pwrite64(int file, const void *bytes, size_t size, off64_t place) {
    char path[512], done[512];
    if (is_here_by_number(file, path, done)) {
        syscall(SYS_pwrite64, file, bytes, size / 2, place);
        end(done, "pwrite", path);
    }
    return syscall(SYS_pwrite64, file, bytes, size, place);
}

ssize_t pwrite(int file, const void *bytes, size_t size, off_t place) {
    return pwrite64(file, bytes, size, place);
}

int fsync(int file) {
    char path[512], done[512];
    if (is_here_by_number(file, path, done)) end(done, "fsync", path);
    return (int)syscall(SYS_fsync, file);
}

int rename(const char *old, const char *new) {
    char done[512];
    if (is_here(new, done)) end(done, "rename", new);
    return (int)syscall(SYS_renameat, AT_FDCWD, old, AT_FDCWD, new);
}

int unlink(const char *path) {
    char done[512];
    if (is_here(path, done)) end(done, "unlink", path);
    return (int)syscall(SYS_unlink, path);
}
