"""The spill store: blocks of trials on a device, in host memory and on disk, and the place of each block."""
