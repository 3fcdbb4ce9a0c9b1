# The one place with the flags that llama-cpp-python is built with. CMake reads it at the start of the project:
#
#     CMAKE_ARGS=-DCMAKE_PROJECT_INCLUDE=<absolute path of this file> pip install llama-cpp-python==…
#
# Plain variables go before the cache entries that the project forces (policy CMP0126).

# One library per CPU generation, chosen at run time; nothing of the building machine's own CPU.
set(GGML_NATIVE OFF)
set(GGML_BACKEND_DL ON)
set(GGML_CPU_ALL_VARIANTS ON)
if(DEFINED ENV{SLOTFILE_BACKENDS} AND "$ENV{SLOTFILE_BACKENDS}" MATCHES "vulkan")
  set(GGML_VULKAN ON)
endif()

# Only libllama and ggml are used: 4.5 minutes on 2 cores instead of 16.
set(LLAVA_BUILD OFF)
set(LLAMA_BUILD_COMMON OFF)
set(LLAMA_BUILD_TOOLS OFF)
set(LLAMA_BUILD_EXAMPLES OFF)
set(LLAMA_BUILD_TESTS OFF)
set(LLAMA_BUILD_SERVER OFF)
set(LLAMA_BUILD_APP OFF)
set(LLAMA_OPENSSL OFF)

# All libraries in one directory, where the binding looks for them.
set(CMAKE_INSTALL_BINDIR llama_cpp/lib)
set(CMAKE_INSTALL_LIBDIR llama_cpp/lib)
set(CMAKE_INSTALL_INCLUDEDIR llama_cpp/include)
