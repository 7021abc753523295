# The files of src/isa: one per instruction set, each the only one that is compiled with its flags.
# tools/check_native.py proves that nothing of them but their table can be linked to from elsewhere.

set(isa_names scalar scalartiles avx2 avx512 avx512bf16 amx)
set(isa_flags_scalar "")
set(isa_flags_scalartiles "")
set(isa_flags_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
set(isa_flags_avx512bf16 ${isa_flags_avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi)
set(isa_flags_amx ${isa_flags_avx512bf16} -mgfni -mamx-tile -mamx-bf16)

# Makes an object library isa_<name> of every src/isa/<name>.cc for this processor, and lists their objects in `result`.
# Files there that are not named after an instruction set are compiled for any processor.
function(proa_add_isa_objects result)
    file(GLOB files CONFIGURE_DEPENDS src/isa/*.cc)
    set(objects "")
    foreach(file IN LISTS files)
        cmake_path(GET file STEM name)
        if(name IN_LIST isa_names AND NOT name MATCHES "^scalar" AND NOT PROA_X86)
            continue()
        endif()
        add_library(isa_${name} OBJECT ${file})
        target_link_libraries(isa_${name} PRIVATE proa_flags)
        if(name IN_LIST isa_names)
            # Exceptions would bring in shared symbols of the runtime.
            target_compile_options(isa_${name} PRIVATE ${isa_flags_${name}} -fno-exceptions -fno-rtti)
            if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU") # whose own AVX-512 headers leave a `__Y = __Y` undefined on purpose
                target_compile_options(isa_${name} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
            endif()
        endif()
        # Of the file, not of the target: these must stand behind -fsanitize.
        set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "")
        if(PROA_SANITIZE AND name STREQUAL "amx")
            # Few machines could run it; what it does with memory, scalartiles does too.
            set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "-fno-sanitize=all;-O0")
        elseif(PROA_SANITIZE MATCHES "address|undefined")
            # Thousands of unrolled tiles: with every check GCC takes three minutes a file, with these thirty seconds.
            # Registers are arrays on the stack to a sanitizer; those are within the bounds that UBSan proves.
            # Arithmetic that is undefined would be so in the scalar kernels too, which are watched for it.
            set(unwatched undefined)
            if(name MATCHES "^scalar")
                set(unwatched null,object-size)
            endif()
            set_source_files_properties(
                ${file} PROPERTIES COMPILE_OPTIONS
                                   "-fno-sanitize=${unwatched};$<$<CXX_COMPILER_ID:GNU>:--param=asan-stack=0>"
            )
        elseif(PROA_SANITIZE MATCHES "thread" AND NOT name MATCHES "^scalar")
            # The same writes as the scalar kernels', which are watched; to watch them all takes minutes to compile.
            set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread")
        endif()
        list(APPEND objects $<TARGET_OBJECTS:isa_${name}>)
    endforeach()
    set(${result} ${objects} PARENT_SCOPE)
endfunction()
