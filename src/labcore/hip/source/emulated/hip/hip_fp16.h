#include "../../cpu_hip.h"
