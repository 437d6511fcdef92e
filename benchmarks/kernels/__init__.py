"""What kernels take on a GPU, and what the compiler says of them."""
