from decoder.plugins.experimental_sglang.plugin import (
    ALGORITHM as ALGORITHM,
    register as register,
)
