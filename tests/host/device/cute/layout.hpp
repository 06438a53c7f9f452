// What layout.h of the package takes of CuTe where no tile is swizzled.
#pragma once

#include "cute/config.hpp"

namespace cute {
template <int, int, int>
struct Swizzle;
}
