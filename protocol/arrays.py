"""The types of numpy arrays that several modules use."""

import numpy as np
import numpy.typing as npt

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
Float32 = npt.NDArray[np.float32]
