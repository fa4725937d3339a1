# The library as somebody else has just built it: what tools/build.sh gives the Python package.
set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
add_library(regard_static STATIC IMPORTED)
set_target_properties(regard_static PROPERTIES IMPORTED_LOCATION ${REGARD_STATIC_LIBRARY})
target_include_directories(regard_static INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_compile_features(regard_static INTERFACE cxx_std_20)
target_link_libraries(regard_static INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
