# Static 64-bit ARM Linux programs from any machine, with the clang and musl that `pip install ziglang` brings:
#
#   cmake -S csrc -B build-arm --toolchain toolchains/aarch64-musl-zig.cmake
#
# zig is looked for as a program, then in Python's package; -DZIG= names it. What is built runs on any ARM Linux
# without its libraries, and here under qemu-aarch64-static (Debian: qemu-user-static) through `ctest`.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ZIG)

find_program(ZIG zig)
if(NOT ZIG)
  find_program(ONDEVICE_PYTHON NAMES python3 python)
  if(Python3_EXECUTABLE)
    set(ONDEVICE_PYTHON ${Python3_EXECUTABLE})
  endif()
  execute_process(
    COMMAND ${ONDEVICE_PYTHON} -c "from importlib.util import find_spec
print(find_spec('ziglang').submodule_search_locations[0] + '/zig', end='')"
    OUTPUT_VARIABLE ONDEVICE_ZIG ERROR_QUIET)
  if(NOT EXISTS "${ONDEVICE_ZIG}")
    message(FATAL_ERROR "zig was not found. Try: pip install ziglang, with -DPython3_EXECUTABLE= or -DZIG=")
  endif()
  set(ZIG "${ONDEVICE_ZIG}" CACHE FILEPATH "the zig program" FORCE)
endif()

set(CMAKE_CXX_COMPILER ${ZIG} c++ --target=aarch64-linux-musl)
# `cmake -S` links nothing: for each program, with other flags, zig would build its C and C++ libraries for minutes.
# So checks compile only, and which compiler it is, which CMake finds out by linking, is said here.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_CXX_COMPILER_ID_RUN TRUE)
set(CMAKE_CXX_COMPILER_ID Clang)
set(CMAKE_CXX_COMPILER_VERSION 17)
set(CMAKE_CXX_COMPILER_FRONTEND_VARIANT GNU)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_CXX_EXTENSIONS_COMPUTED_DEFAULT ON)
set(CMAKE_AR ${ZIG} CACHE FILEPATH "" FORCE)
set(CMAKE_CXX_ARCHIVE_CREATE "<CMAKE_AR> ar qcs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_APPEND "<CMAKE_AR> ar qs <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-static -s")
# zig defines NDEBUG when it optimises; with it ExecuTorch's headers declare glibc's __assert_fail, not musl's.
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -UNDEBUG" CACHE STRING "")
set(BUILD_SHARED_LIBS OFF CACHE BOOL "")

find_program(QEMU_AARCH64 NAMES qemu-aarch64-static qemu-aarch64)
if(QEMU_AARCH64 AND NOT CMAKE_HOST_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(CMAKE_CROSSCOMPILING_EMULATOR ${QEMU_AARCH64})
endif()
