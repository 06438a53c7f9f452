#pragma once

namespace cute {

template <int, int, int>
struct Swizzle;  // of tiles that no kernel here uses

}  // namespace cute
