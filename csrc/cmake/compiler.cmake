# Finds a compiler that is new enough, or stops with a message that names what to install. Sets PROA_X86 and
# PROA_STATIC_RUNTIME.

if(NOT CMAKE_HOST_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "Proa's native library is for Linux, not for ${CMAKE_HOST_SYSTEM_NAME}.")
endif()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
    message(
        FATAL_ERROR
            "Proa needs a C++ compiler and there is none. Install one (Debian, Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++ libstdc++-static; Arch: pacman -S gcc), or name one: CXX=/path/to/g++"
    )
endif()
enable_language(CXX)

set(minimum_GNU 11)
set(minimum_Clang 14)
if(NOT DEFINED minimum_${CMAKE_CXX_COMPILER_ID} OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS
                                                   minimum_${CMAKE_CXX_COMPILER_ID}
)
    message(
        FATAL_ERROR
            "Proa needs GCC >= ${minimum_GNU} or Clang >= ${minimum_Clang} (C++20, AMX), but ${CMAKE_CXX_COMPILER} is "
            "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}. Name another one: CXX=/path/to/g++"
    )
endif()

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" processor)
set(PROA_X86 OFF)
if(processor MATCHES "^(x86_64|amd64)$")
    set(PROA_X86 ON)
elseif(NOT processor MATCHES "^(aarch64|arm64)$")
    message(FATAL_ERROR "Proa's native library is for x86-64 and aarch64, not for ${CMAKE_SYSTEM_PROCESSOR}.")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# The C++ runtime is linked into the library, which then also runs where another version, or none, is installed.
include(CheckCXXSourceCompiles)
set(PROA_STATIC_RUNTIME -static-libstdc++ -static-libgcc)
set(CMAKE_REQUIRED_LINK_OPTIONS ${PROA_STATIC_RUNTIME})
check_cxx_source_compiles("#include <string>\nint main() { return std::string(\"a\").size() != 1; }" PROA_HAS_STATIC_RUNTIME)
unset(CMAKE_REQUIRED_LINK_OPTIONS)
if(NOT PROA_HAS_STATIC_RUNTIME)
    set(PROA_STATIC_RUNTIME "")
    message(STATUS "This machine has no static libstdc++ (Fedora: dnf install libstdc++-static): "
                   "the library will need the libstdc++.so of this machine."
    )
endif()
