# Lets a library that is linked here be loaded by older systems.
#
# glibc 2.34 took the functions of libpthread, libdl and librt into libc.so.6, under new versions. What is linked against
# that asks for glibc 2.34, though it calls what was always there. So it is linked against stand-ins of the three
# libraries, which export the same functions under the versions that they had on x86-64 before. Every glibc has libraries
# of these names and versions. Nothing of the stand-ins is shipped.

set(FP8CUTLASS_GLIBC_pthread
    pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create
    pthread_key_delete pthread_kill pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
    pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
    pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
    pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy
    pthread_rwlockattr_init pthread_rwlockattr_setpshared pthread_setspecific pthread_spin_destroy pthread_spin_init
    pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_destroy sem_init sem_post sem_timedwait sem_trywait
    sem_wait)
set(FP8CUTLASS_GLIBC_dl dladdr dlclose dlerror dlopen dlsym dlvsym)
set(FP8CUTLASS_GLIBC_rt shm_open shm_unlink)
set(FP8CUTLASS_GLIBC_LATER_dl dlmopen) # of 2.3.4, all others of 2.2.5

# Makes target old_<name>, a stand-in of lib<name>.so.<number>.
function(fp8cutlass_stand_in name number)
  set(folder "${CMAKE_CURRENT_BINARY_DIR}/glibc")
  set(code "")
  foreach(function ${FP8CUTLASS_GLIBC_${name}} ${FP8CUTLASS_GLIBC_LATER_${name}})
    string(APPEND code "extern \"C\" __attribute__((visibility(\"default\"))) void ${function}() {}\n")
  endforeach()
  string(REPLACE ";" "; " first "${FP8CUTLASS_GLIBC_${name}}")
  set(versions "GLIBC_2.2.5 { global: ${first}; local: *; };\n")
  if(FP8CUTLASS_GLIBC_LATER_${name})
    string(REPLACE ";" "; " later "${FP8CUTLASS_GLIBC_LATER_${name}}")
    string(APPEND versions "GLIBC_2.3.4 { global: ${later}; } GLIBC_2.2.5;\n")
  endif()
  file(WRITE "${folder}/${name}.cpp" "${code}")
  file(WRITE "${folder}/${name}.map" "${versions}")
  add_library(old_${name} SHARED "${folder}/${name}.cpp")
  set_target_properties(old_${name} PROPERTIES OUTPUT_NAME ${name} SOVERSION ${number}
                        LIBRARY_OUTPUT_DIRECTORY "${folder}")
  target_compile_options(old_${name} PRIVATE -fno-builtin)
  target_link_options(old_${name} PRIVATE -nostdlib "LINKER:--version-script=${folder}/${name}.map")
endfunction()

# For a target: the stand-ins, where they mean something.
function(fp8cutlass_old_glibc target)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    fp8cutlass_stand_in(pthread 0)
    fp8cutlass_stand_in(dl 2)
    fp8cutlass_stand_in(rt 1)
    target_link_libraries(${target} PRIVATE old_pthread old_dl old_rt)
  else()
    target_link_libraries(${target} PRIVATE rt pthread dl)
  endif()
endfunction()
