# Static 64-bit ARM Linux programs with Debian's cross compiler (apt install g++-aarch64-linux-gnu):
#
#   cmake -S csrc -B build-arm --toolchain toolchains/aarch64-linux-gnu.cmake
#
# What is built runs on any ARM Linux, a Jetson among them, without its libraries, and on another machine under
# qemu-aarch64-static (Debian: qemu-user-static) through `ctest`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static -s")
set(BUILD_SHARED_LIBS OFF CACHE BOOL "")

find_program(QEMU_AARCH64 NAMES qemu-aarch64-static qemu-aarch64)
if(QEMU_AARCH64 AND NOT CMAKE_HOST_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU_AARCH64})
endif()
