#pragma once

#include <cute/config.hpp>
