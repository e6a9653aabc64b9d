# Library, headers, and what find_package and pkg-config read. Everything is found relative to the files themselves, so
# the prefix may be moved. With VIDEO_VAE_SONAME, a library file with that soname and its version's name gets the links
# that the loader and the linker look for.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/video_vae)
if(WIN32)
    set(runtime_folder ${CMAKE_INSTALL_BINDIR})
else()
    set(runtime_folder ${CMAKE_INSTALL_LIBDIR})
endif()
get_filename_component(library_name ${VIDEO_VAE_LIBRARY} NAME)
get_filename_component(import_name "${VIDEO_VAE_IMPORT_LIBRARY}" NAME)
set(VIDEO_VAE_SONAME "" CACHE STRING "The soname inside the library; default: libvideo_vae.so, without links")
set(soname libvideo_vae.so)
if(VIDEO_VAE_SONAME)
    set(soname ${VIDEO_VAE_SONAME})
endif()
# Programs find the library where it was when they were linked, without LD_LIBRARY_PATH.
set(pc_rpath "")
if(NOT WIN32)
    set(pc_rpath "-Wl,-rpath,\${libdir} ")
endif()
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)

configure_package_config_file(cmake/video_vae-config.cmake.in video_vae-config.cmake
    INSTALL_DESTINATION ${package_folder}
    PATH_VARS CMAKE_INSTALL_INCLUDEDIR CMAKE_INSTALL_LIBDIR runtime_folder)
write_basic_package_version_file(video_vae-config-version.cmake COMPATIBILITY SameMajorVersion)
configure_file(cmake/video_vae.pc.in video_vae.pc @ONLY)

install(PROGRAMS ${VIDEO_VAE_LIBRARY} DESTINATION ${runtime_folder})
if(VIDEO_VAE_SONAME)
    install(CODE "
        set(folder \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${runtime_folder}\")
        file(CREATE_LINK ${library_name} \"\${folder}/${soname}\" SYMBOLIC)
        file(CREATE_LINK ${soname} \"\${folder}/libvideo_vae.so\" SYMBOLIC)")
endif()
if(VIDEO_VAE_IMPORT_LIBRARY)
    install(FILES ${VIDEO_VAE_IMPORT_LIBRARY} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(FILES ${root}/include/video_vae.h ${root}/include/video_vae.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/video_vae-config.cmake
    ${CMAKE_CURRENT_BINARY_DIR}/video_vae-config-version.cmake DESTINATION ${package_folder})
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/video_vae.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
