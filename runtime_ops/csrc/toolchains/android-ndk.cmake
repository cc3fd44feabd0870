# For phones, with the toolchain of an Android NDK (r25 or newer) that $ANDROID_NDK or -DANDROID_NDK= names:
#
#   cmake -S csrc -B build-android --toolchain toolchains/android-ndk.cmake -DEXECUTORCH_INCLUDE=/path/to/include
#
# 64-bit ARM and API 26, which the app needs at least; -DANDROID_ABI= and -DANDROID_PLATFORM= choose others.
# The C++ library is the shared one, which an app that loads ExecuTorch's own library has already.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ANDROID_NDK ANDROID_ABI ANDROID_PLATFORM ANDROID_STL)
if(NOT ANDROID_NDK)
  set(ANDROID_NDK "$ENV{ANDROID_NDK}")
endif()
if(NOT EXISTS "${ANDROID_NDK}/build/cmake/android.toolchain.cmake")
  message(FATAL_ERROR "No Android NDK in '${ANDROID_NDK}'. Try: set ANDROID_NDK to the folder that holds "
                      "build/cmake/android.toolchain.cmake")
endif()
if(NOT ANDROID_ABI)
  set(ANDROID_ABI arm64-v8a)
endif()
if(NOT ANDROID_PLATFORM)
  set(ANDROID_PLATFORM android-26)
endif()
if(NOT ANDROID_STL)
  set(ANDROID_STL c++_shared)
endif()
include("${ANDROID_NDK}/build/cmake/android.toolchain.cmake")
