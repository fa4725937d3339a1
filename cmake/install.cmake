# find_package(regard) and pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS regard_shared EXPORT regard-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
set_target_properties(regard_static PROPERTIES EXPORT_NAME regard_static)
install(TARGETS regard_static EXPORT regard-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(REGARD_BUILD_CLI)
  install(TARGETS regard_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/regard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT regard-targets NAMESPACE regard::
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/regard)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/regard-config.cmake.in
  ${PROJECT_BINARY_DIR}/regard-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/regard)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/regard-config-version.cmake
  COMPATIBILITY SameMajorVersion)
configure_file(${CMAKE_CURRENT_LIST_DIR}/regard.pc.in ${PROJECT_BINARY_DIR}/regard.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/regard-config.cmake
  ${PROJECT_BINARY_DIR}/regard-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/regard)
install(FILES ${PROJECT_BINARY_DIR}/regard.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
