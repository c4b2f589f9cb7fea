# Headers, both libraries, the tools that were built, the CMake package, attn.pc and the licence.
include(CMakePackageConfigHelpers)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/attn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS attn attn_static EXPORT attn-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Beside libattn, where hip-emu looks for it.
if(TARGET attn_hipemu)
  install(TARGETS attn_hipemu LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
foreach(tool attn_cli attn_fp8_stress)
  if(TARGET ${tool})
    install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()

set(attn_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/attn)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/attn-config.cmake.in
  ${PROJECT_BINARY_DIR}/attn-config.cmake INSTALL_DESTINATION ${attn_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/attn-config-version.cmake
  COMPATIBILITY SameMinorVersion)  # as SOVERSION
install(FILES ${PROJECT_BINARY_DIR}/attn-config.cmake
  ${PROJECT_BINARY_DIR}/attn-config-version.cmake DESTINATION ${attn_package_dir})
install(EXPORT attn-targets NAMESPACE attn:: DESTINATION ${attn_package_dir})

# attn.pc finds its prefix from where it lies, so that `cmake --install --prefix` may choose any.
file(RELATIVE_PATH attn_prefix_from_pc
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" attn_prefix_from_pc ${attn_prefix_from_pc})
configure_file(${CMAKE_CURRENT_LIST_DIR}/attn.pc.in ${PROJECT_BINARY_DIR}/attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
