// Selection of the kernels for this CPU. Belongs here: querying the CPU, and the debug option for lesser kernels.
#pragma once

#include <string>

#include "isa/kernels.h"

namespace proa {

struct Selected {
    const Kernels* kernels;
    std::string reason;  // why there are no better kernels
};

// The best kernels that this CPU runs, or those named `wanted` if not "". Throws Error (argument) if there are none of
// that name, or the CPU cannot run them.
Selected select_kernels(const std::string& wanted);

// The kernels of that name, for their facts only: this CPU may lack the instruction set. Throws Error (argument).
const Kernels* kernels_named(const std::string& name);

}  // namespace proa
