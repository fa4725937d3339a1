# What `cmake --install` copies: libraries, headers, the tool, find_package, pkg-config, the licence.
include(CMakePackageConfigHelpers)

install(TARGETS regard_shared EXPORT regard-targets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS regard_static EXPORT regard-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/regard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# The installed tool finds the library from the tool's own folder, wherever both were moved.
if(REGARD_BUILD_CLI)
  file(RELATIVE_PATH bin_to_lib ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set(origin $<IF:$<PLATFORM_ID:Darwin>,@loader_path,$ORIGIN>)
  set_target_properties(regard_cli PROPERTIES INSTALL_RPATH ${origin}/${bin_to_lib})
  install(TARGETS regard_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/regard)
install(EXPORT regard-targets NAMESPACE regard:: DESTINATION ${package_folder})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/regard-config.cmake.in
  ${PROJECT_BINARY_DIR}/regard-config.cmake INSTALL_DESTINATION ${package_folder})
# The C++ structs carry no size: until 1.0 a program needs the minor version that it was built for.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/regard-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/regard-config.cmake
  ${PROJECT_BINARY_DIR}/regard-config-version.cmake DESTINATION ${package_folder})

# pkg-config: the prefix follows from where the file lies; what else a static link needs.
set(pkg_config_folder ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pkg_config_to_prefix ${pkg_config_folder} ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pkg_config_to_prefix "${pkg_config_to_prefix}")
foreach(folder LIBDIR INCLUDEDIR)
  string(TOLOWER pkg_config_${folder} variable)
  set(${variable} ${CMAKE_INSTALL_${folder}})
  if(NOT IS_ABSOLUTE "${${variable}}")
    set(${variable} "\${prefix}/${${variable}}")
  endif()
endforeach()
set(private_libraries ${REGARD_CXX_RUNTIME} m ${CMAKE_DL_LIBS})
list(TRANSFORM private_libraries PREPEND -l)
list(JOIN private_libraries " " private_libraries)
configure_file(${CMAKE_CURRENT_LIST_DIR}/regard.pc.in ${PROJECT_BINARY_DIR}/regard.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/regard.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
