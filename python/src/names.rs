//! Names of tensors as Python callers know them: `str` for a path of one string, else a tuple of
//! `str` and `int`.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};
use tensorizer::error::Error;
use tensorizer::format::catalog::Entry;
use tensorizer::format::name::{Component, Name};

use crate::errors::Raised;

/// Returns the first components of the names of numbered entries, in their order. Each has the
/// number of its entry or, if names go on below it, the list of the numbers of those entries.
pub fn top_level<'e, 'py>(
    py: Python<'py>,
    entries: impl Iterator<Item = (usize, &'e Entry)>,
) -> PyResult<Bound<'py, PyDict>> {
    let top = PyDict::new(py);
    // Entries with the same first component are mostly neighbours, so the last one is kept.
    let mut last: Option<(Component, Bound<'py, PyList>)> = None;
    for (number, entry) in entries {
        let Some(path) = entry.name.path() else {
            top.set_item(entry.name.stored(), number)?;
            continue;
        };
        let below = path.len() > 1;
        let Some(first) = path.into_iter().next() else { continue };
        if !below {
            top.set_item(step_to_python(py, &first)?, number)?;
            continue;
        }
        let numbers = match last.take() {
            Some((step, numbers)) if step == first => numbers,
            _ => {
                let key = step_to_python(py, &first)?;
                match top.get_item(&key)? {
                    Some(numbers) => numbers.cast_into()?,
                    None => {
                        let numbers = PyList::empty(py);
                        top.set_item(key, &numbers)?;
                        numbers
                    }
                }
            }
        };
        numbers.append(number)?;
        last = Some((first, numbers));
    }
    Ok(top)
}

/// Converts a name to the form that Python callers use.
pub fn name_to_python<'py>(py: Python<'py>, name: &Name) -> PyResult<Bound<'py, PyAny>> {
    let Some(path) = name.path() else {
        return Ok(PyString::new(py, name.stored()).into_any());
    };
    let steps = path.iter().map(|component| step_to_python(py, component));
    let steps = steps.collect::<PyResult<Vec<_>>>()?;
    match steps.as_slice() {
        [only] if only.is_instance_of::<PyString>() => Ok(only.clone()),
        _ => Ok(PyTuple::new(py, steps)?.into_any()),
    }
}

fn step_to_python<'py>(py: Python<'py>, step: &Component) -> PyResult<Bound<'py, PyAny>> {
    match step {
        Component::Index(index) => Ok(index.into_pyobject(py)?.into_any()),
        Component::Key(key) => Ok(PyString::new(py, key).into_any()),
    }
}

/// Makes a name of a path that Python passed as a `str` or as a tuple of `str` and `int`.
pub fn name_from_python(name: &Bound<'_, PyAny>) -> PyResult<Name> {
    let invalid = |what: String| PyErr::from(Raised::from(Error::InvalidArgument(what)));
    if let Ok(text) = name.cast::<PyString>() {
        return Name::from_key(unicode(text)?).map_err(invalid);
    }
    let steps = name.try_iter()?.map(|step| component(&step?)).collect::<PyResult<Vec<_>>>()?;
    Name::from_path(&steps).map_err(invalid)
}

/// Does the same; None for an invalid name, and for a `str` that may be a name in its stored form.
pub fn plain_name(name: &Bound<'_, PyAny>) -> Option<Name> {
    let stored = |text: &str| text.starts_with('\u{1e}');
    let text = name.cast::<PyString>().ok().and_then(|text| text.to_str().ok());
    if text.is_some_and(stored) { None } else { name_from_python(name).ok() }
}

/// Returns dtype without `torch.` and shape of entries. Equal values share one object, because many
/// new objects would trigger the garbage collector.
pub fn described<'e, 'py>(
    py: Python<'py>,
    entries: impl Iterator<Item = &'e Entry>,
) -> PyResult<Vec<Bound<'py, PyTuple>>> {
    let mut interned: HashMap<(&str, &[u64]), Bound<'py, PyTuple>> = HashMap::new();
    let described = entries.map(|entry| {
        let (dtype, shape) = (entry.dtype.name(), &*entry.shape);
        if let Some(found) = interned.get(&(dtype, shape)) {
            return Ok(found.clone());
        }
        let made = (PyString::intern(py, dtype), PyTuple::new(py, shape)?).into_pyobject(py)?;
        interned.insert((dtype, shape), made.clone());
        Ok(made)
    });
    described.collect()
}

fn component(step: &Bound<'_, PyAny>) -> PyResult<Component> {
    if step.is_instance_of::<PyInt>() {
        return Ok(Component::Index(step.extract()?));
    }
    Ok(Component::Key(unicode(step.cast::<PyString>()?)?.into()))
}

/// The text of a name, which Python may fill with lone surrogates.
fn unicode<'t>(text: &'t Bound<'_, PyString>) -> PyResult<&'t str> {
    text.to_str().map_err(|error| {
        let what = format!("a tensor name must be valid Unicode, found a lone surrogate: {error}");
        Raised::from(Error::InvalidArgument(what)).into()
    })
}

/// Returns the stored form of a name. Callers may also pass that form.
pub fn stored(name: &Bound<'_, PyAny>) -> Result<String, Raised> {
    if let Ok(text) = name.cast::<PyString>()
        && let Ok(text) = text.to_str()
        && text.starts_with('\u{1e}')
    {
        return Ok(text.to_owned());
    }
    Ok(name_from_python(name)?.stored().to_owned())
}
