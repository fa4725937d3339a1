# REGARD_ISAS: the instruction sets that this processor may have, chosen at run time; and the flags of
# the files of each.
set(regard_flags_scalar)
set(regard_flags_neon)  # every aarch64 has it
set(regard_flags_avx2 -mavx2 -mfma -mf16c)
set(regard_flags_avx512 ${regard_flags_avx2}
  -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(regard_flags_avx512bf16 ${regard_flags_avx512} -mavx512bf16)
# Unwinding would release tile registers, by a weak symbol; kernels throw nothing.
set(regard_flags_amx ${regard_flags_avx512bf16} -mamx-tile -mamx-bf16 -fno-exceptions)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(REGARD_ISAS scalar avx2 avx512 avx512bf16 amx)
  set(regard_processor_sources src/cpu/processor_x86.cpp src/cpu/amx.cpp)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(REGARD_ISAS scalar neon)
  set(regard_processor_sources src/cpu/processor_aarch64.cpp)
else()
  set(REGARD_ISAS scalar)
  set(regard_processor_sources src/cpu/processor_any.cpp)
endif()

# regard_isa_file(FILE ISA): compiles the file as a part of the instruction set.
function(regard_isa_file file isa)
  set(flags ${regard_flags_${isa}})
  # GCC 12 takes the undefined operands inside its own AVX-512 intrinsics for a mistake of ours.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    list(APPEND flags -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
  # GCC warns of arrays whose bound is an int that depends on a template.
  list(APPEND flags -Wno-sign-conversion)
  # Contraction would let one ISA's scalar code round unlike another's.
  list(APPEND flags -ffp-contract=off)
  if(REGARD_SANITIZE)
    list(APPEND flags -O1)  # which compiles in a third to a seventh of the time of -O3
  else()
    list(APPEND flags -O3)
  endif()
  # The guards of harden.cmake cost time in the innermost functions.
  list(APPEND flags -fno-stack-protector -U_FORTIFY_SOURCE)
  set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${flags}")
endfunction()

function(regard_add_isa_sources target)
  target_sources(${target} PRIVATE ${regard_processor_sources})
  foreach(isa IN LISTS REGARD_ISAS)
    set(source src/cpu/kernels/isa_${isa}.cpp)
    target_sources(${target} PRIVATE ${source})
    regard_isa_file(${source} ${isa})
  endforeach()
endfunction()
