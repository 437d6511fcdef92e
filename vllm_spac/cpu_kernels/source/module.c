// Python finds and loads the library as a module; its functions are called through ctypes, which needs no Python here.
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_simd", NULL, 0, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__simd(void) { return PyModule_Create(&module); }
