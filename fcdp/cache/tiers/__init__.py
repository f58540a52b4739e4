"""Where entries lie: device memory, host memory, disk. One file each."""
