"""Settings of processes that compute on an accelerator of this host: products of float32 are made in float32.

Importing this module makes them, before the first product. cuBLAS and cuDNN read the variable as they start; torch's
own settings have one name up to torch 2.8 and another since. What a build for a GPU warns of is no failure of a case.
"""

import os
import warnings

os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
warnings.simplefilter("default")
