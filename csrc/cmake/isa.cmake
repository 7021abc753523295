# The files of src/isa: one per instruction set, which alone is compiled with that instruction set's flags.
# tools/check_native.py checks that each exports nothing but its table to the linker.

set(isa_names scalar scalartiles avx2 avx512 avx512bf16 amx)
set(isa_flags_scalar "")
set(isa_flags_scalartiles "")
set(isa_flags_avx2 -mavx2 -mfma -mf16c -mbmi2)
set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
set(isa_flags_avx512bf16 ${isa_flags_avx512} -mavx512bf16 -mavx512vnni -mavx512vbmi)
set(isa_flags_amx ${isa_flags_avx512bf16} -mgfni -mamx-tile -mamx-bf16)

# Instruction sets that sanitizer builds leave out. AMX: few machines could run it, and the emulated tiles access memory
# in the same way. ThreadSanitizer: vector kernels write the same memory as the scalar ones, and take minutes to compile
# when instrumented.
set(isa_left_out "")
if(PROA_SANITIZE MATCHES "thread")
    set(isa_left_out avx2 avx512 avx512bf16 amx)
elseif(PROA_SANITIZE)
    set(isa_left_out amx)
endif()

# The kernels unroll thousands of tiles: with every check GCC takes three minutes per file, with these options thirty
# seconds. ASan does not instrument the stack, where registers are arrays whose bounds UBSan checks. UBSan instruments
# the scalar kernels only: undefined arithmetic would be undefined there too. They are compiled with -O0: GCC takes
# three times as long to optimise instrumented code, more than the tests gain from it.
set(watched_kernels "")
set(watched_scalar_kernels "")
if(PROA_SANITIZE MATCHES "address|undefined")
    set(no_stack $<$<CXX_COMPILER_ID:GNU>:--param=asan-stack=0>)
    set(watched_kernels -fno-sanitize=undefined ${no_stack})
    set(watched_scalar_kernels -fno-sanitize=null,object-size -O0 ${no_stack})
endif()

# Makes an object library isa_<name> of every src/isa/<name>.cc for this processor, and lists their objects in `result`.
# Files there that are not named after an instruction set are compiled for any processor. PROA_HAS_<name> is defined for
# every file of the library, for each instruction set but the scalar ones whose kernels are built.
function(proa_add_isa_objects result)
    file(GLOB files CONFIGURE_DEPENDS src/isa/*.cc)
    set(objects "")
    foreach(file IN LISTS files)
        cmake_path(GET file STEM name)
        if(name IN_LIST isa_names AND NOT name MATCHES "^scalar")
            if(NOT PROA_X86 OR name IN_LIST isa_left_out)
                continue()
            endif()
            target_compile_definitions(proa_flags INTERFACE PROA_HAS_${name})
        endif()
        add_library(isa_${name} OBJECT ${file})
        target_link_libraries(isa_${name} PRIVATE proa_flags)
        if(name IN_LIST isa_names)
            # Exceptions would bring in shared symbols of the runtime.
            target_compile_options(isa_${name} PRIVATE ${isa_flags_${name}} -fno-exceptions -fno-rtti)
            if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU") # its AVX-512 headers initialise `__Y = __Y` on purpose
                target_compile_options(isa_${name} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
            endif()
        endif()
        set(special ${watched_kernels})
        if(name MATCHES "^scalar")
            set(special ${watched_scalar_kernels})
        endif()
        if(name STREQUAL "scalartiles" AND NOT special) # only used by tests; -O1 takes a third of the time to compile
            set(special -O1)
        endif()
        # Set for the file, not for the target: these options must come after -fsanitize.
        set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${special}")
        list(APPEND objects $<TARGET_OBJECTS:isa_${name}>)
    endforeach()
    set(${result} ${objects} PARENT_SCOPE)
endfunction()
