// libstdc++ asks this flag of glibc 2.32 whether atomics may be left out. The library has its own, which says no: so it
// asks for no such glibc (csrc/glibc.cmake).
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
