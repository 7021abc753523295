// Which kernels this CPU runs. Belongs here: asking the CPU, and the debug switch that asks for less.
#pragma once

#include <string>

#include "isa/kernels.h"

namespace proa {

struct Selected {
    const Kernels* kernels;
    std::string reason;  // why none better
};

// The best kernels of this CPU; wanted: "" or the name of ones no better. Throws Error (argument) if there are none of
// that name or the CPU cannot run them.
Selected select_kernels(const std::string& wanted);

}  // namespace proa
