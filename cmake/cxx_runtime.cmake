# REGARD_CXX_RUNTIME: the library of the C++ runtime that the compiler links, e.g. stdc++ or c++.
set(REGARD_CXX_RUNTIME ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER REGARD_CXX_RUNTIME INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi)$")
list(REMOVE_DUPLICATES REGARD_CXX_RUNTIME)
