#include "proa/native.h"

int proa_abi_version() { return PROA_ABI_VERSION; }
