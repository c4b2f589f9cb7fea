# Headers, both libraries, the tools that were built, the CMake package, attn.pc and the licence; all but
# the tools is the component library, which CPack's archive and Debian package hold.
include(CMakePackageConfigHelpers)
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME library)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/attn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS attn attn_static EXPORT attn-targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
# Beside libattn, where hip-emu looks for it.
if(TARGET attn_hipemu)
  install(TARGETS attn_hipemu LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT tools)
endif()
foreach(tool attn_cli attn_fp8_stress)
  if(TARGET ${tool})
    install(TARGETS ${tool} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
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

# attn.pc finds its prefix from where it is, so that `cmake --install --prefix` may choose any.
file(RELATIVE_PATH attn_prefix_from_pc
  ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" attn_prefix_from_pc ${attn_prefix_from_pc})
configure_file(${CMAKE_CURRENT_LIST_DIR}/attn.pc.in ${PROJECT_BINARY_DIR}/attn.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/attn.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

set(CPACK_INSTALL_CMAKE_PROJECTS "${PROJECT_BINARY_DIR};libattn;library;/")
set(CPACK_PACKAGE_NAME libattn)
set(CPACK_PACKAGE_VENDOR libattn)
set(CPACK_PACKAGE_CONTACT "libattn <libattn@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Attention forward on NVIDIA, AMD and CPU")
set(CPACK_PACKAGE_FILE_NAME libattn-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})
set(CPACK_STRIP_FILES ON)
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_MONOLITHIC_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
include(CPack)
