# Device code, and the page of `attn bench --report`, as data. Each image becomes an assembly file of one .incbin; attn_embed_table() makes the table
# of all of them, attn::images().

# Embeds FILE, the code of kernel NAME for ARCH, into the object library `target`. FILE is made by a custom
# command; the image is assembled again when it changes.
function(attn_embed target)
  cmake_parse_arguments(PARSE_ARGV 1 image "" "NAME;ARCH;FILE" "")
  set(symbol attn_image_${image_NAME}_${image_ARCH})
  set(source ${PROJECT_BINARY_DIR}/images/${symbol}.S)
  set(alignment 16)  # of fatbins, whose header is made of words of 8 bytes; there are some 300
  if(image_ARCH MATCHES "^gfx")
    set(alignment 256)
  endif()
  # The 0 after the image ends plain PTX, which drivers take as a string.
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
.section .rodata
.hidden @symbol@_begin
.hidden @symbol@_end
.globl @symbol@_begin
.globl @symbol@_end
.balign @alignment@
@symbol@_begin:
.incbin "@image_FILE@"
@symbol@_end:
.byte 0
.section .note.GNU-stack, "", %progbits
]])
  target_sources(${target} PRIVATE ${source})
  set_source_files_properties(${source} TARGET_DIRECTORY ${target}
    PROPERTIES OBJECT_DEPENDS ${image_FILE})
  set_property(TARGET ${target} APPEND PROPERTY ATTN_IMAGES "${image_NAME}/${image_ARCH}")
endfunction()

# Must follow the last attn_embed().
function(attn_embed_table target)
  get_target_property(images ${target} ATTN_IMAGES)
  if(NOT images)
    set(images)
  endif()
  set(declarations)
  set(rows)
  foreach(image IN LISTS images)
    string(REPLACE / ";" parts ${image})
    list(GET parts 0 name)
    list(GET parts 1 arch)
    set(symbol attn_image_${name}_${arch})
    string(APPEND declarations "ATTN_HIDDEN extern const unsigned char ${symbol}_begin[], ${symbol}_end[];\n")
    string(APPEND rows "    {\"${name}\", \"${arch}\", ${symbol}_begin, ${symbol}_end},\n")
  endforeach()
  list(LENGTH images count)
  set(source ${PROJECT_BINARY_DIR}/images/images_table.cpp)
  file(CONFIGURE OUTPUT ${source} @ONLY CONTENT [[
// Made by cmake/AttnEmbed.cmake.
#include <array>

#include "catalog/catalog.h"

#define ATTN_HIDDEN __attribute__((visibility("hidden")))
extern "C" {
@declarations@}

namespace attn {

std::span<const Image> images() {
  static const std::array<Image, @count@> table{{
@rows@  }};
  return table;
}

}  // namespace attn
]])
  target_sources(${target} PRIVATE ${source})
endfunction()
