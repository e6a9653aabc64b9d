# graph_host opens the library at run time; roundtrip and the test's program link it.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release)
endif()
if(MSVC)
    add_compile_options(/W4 /utf-8)
else()
    add_compile_options(-Wall -Wextra -pedantic)
endif()
if(MINGW)
    add_link_options(-static) # so that the compiler's own libraries need not be beside the programs
endif()
find_package(Threads REQUIRED)

set(sources main library catalog print_catalog json graph frames progress interrupt job)
if(WIN32)
    list(APPEND sources platform_windows)
else()
    list(APPEND sources platform_posix)
endif()
list(TRANSFORM sources PREPEND graph_host/)
list(TRANSFORM sources APPEND .cpp)
add_executable(graph_host ${sources})
target_include_directories(graph_host PRIVATE ${root}/include)
target_compile_definitions(graph_host PRIVATE VIDEO_VAE_BUILT_WITH="${VIDEO_VAE_LIBRARY}")
target_link_libraries(graph_host PRIVATE ${CMAKE_DL_LIBS} Threads::Threads)

add_library(video_vae SHARED IMPORTED)
set_target_properties(video_vae PROPERTIES
    IMPORTED_LOCATION ${VIDEO_VAE_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${root}/include)
if(WIN32)
    set_target_properties(video_vae PROPERTIES IMPORTED_IMPLIB ${VIDEO_VAE_IMPORT_LIBRARY})
endif()

add_executable(roundtrip roundtrip.cpp)
target_link_libraries(roundtrip PRIVATE video_vae)

add_executable(golden EXCLUDE_FROM_ALL tests/golden.cpp)
target_link_libraries(golden PRIVATE video_vae)
