#pragma once

#define CUTE_HOST_DEVICE inline
