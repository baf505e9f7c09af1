/* What a Python program under valgrind's callgrind tells it, at the cost of one C call each. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <valgrind/callgrind.h>

static PyObject *start(PyObject *self, PyObject *none)
{
    CALLGRIND_START_INSTRUMENTATION;
    Py_RETURN_NONE;
}

static PyObject *toggle(PyObject *self, PyObject *none)
{
    CALLGRIND_TOGGLE_COLLECT;
    Py_RETURN_NONE;
}

static PyObject *zero(PyObject *self, PyObject *none)
{
    CALLGRIND_ZERO_STATS;
    Py_RETURN_NONE;
}

static PyObject *dump(PyObject *self, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL)
        return NULL;
    CALLGRIND_DUMP_STATS_AT(text);
    Py_RETURN_NONE;
}

static double now_s;

static PyObject *clock_s(PyObject *self, PyObject *none)
{
    return PyFloat_FromDouble(now_s);
}

static PyObject *pass(PyObject *self, PyObject *seconds)
{
    now_s += PyFloat_AsDouble(seconds);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_NOARGS, "Begin to instrument, which is slow from here on."},
    {"toggle", toggle, METH_NOARGS, "Begin to count, or end."},
    {"zero", zero, METH_NOARGS, "Count from nothing."},
    {"dump", dump, METH_O, "Write the counts down, by a name."},
    {"clock", clock_s, METH_NOARGS, "A clock in seconds, which stands still."},
    {"pass_s", pass, METH_O, "Set that forward by so many seconds."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "callgrind", NULL, -1, methods};

PyMODINIT_FUNC PyInit_callgrind(void)
{
    return PyModule_Create(&module);
}
