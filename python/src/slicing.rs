//! Plans for many tensors of a file, each made in one call.

use pyo3::prelude::*;
use pyo3::types::{PyInt, PySlice, PyTuple};
use tensorizer::format::catalog::Entry;
use tensorizer::io::WantedRead;

use crate::errors::Outcome;
use crate::reader::Reader;

/// One dimension of an index: a range of indices, and the step between those that are selected;
/// None for one index, whose dimension is dropped.
type IndexStep = ((u64, u64), Option<u64>);

/// Returns the index to apply to the loaded part of a dimension.
fn remaining_index(py: Python<'_>, stride: Option<u64>) -> PyResult<Bound<'_, PyAny>> {
    match stride {
        Some(stride) => py.get_type::<PySlice>().call1((py.None(), py.None(), stride)),
        None => Ok(PyInt::new(py, 0).into_any()),
    }
}

/// First index and end in each dimension.
type SliceBounds = Vec<(u64, u64)>;
/// Boxes of a tensor, and the index to apply to what is loaded of them.
type BoxesAndIndex<'py> = (Vec<SliceBounds>, Bound<'py, PyTuple>);
/// Values of some tensors, by their position in a list.
type ByPosition<T> = Vec<(usize, T)>;

/// Returns the same file with the wanted parts of some tensors as its only tensors. `indices` has
/// an index for each of the first tensors, or None. `shards` has the dimension in which each tensor
/// is cut, or None, with a rank and the number of ranks: they are cut as `torch.chunk` cuts them.
/// Tensors without either are whole.
///
/// For each index that has steps or drops dimensions, it also returns the position of the tensor in
/// the list and the index to apply to the loaded part; and for each tensor that has not one box, its
/// position and their number. `fallback` is called with the position of a tensor whose cut is not
/// handled here: it returns boxes and the index to apply, or raises.
#[pyfunction]
#[allow(clippy::type_complexity)]
pub fn plan_parts<'py>(
    py: Python<'py>,
    reader: &Reader,
    numbers: Vec<usize>,
    indices: Vec<Bound<'py, PyAny>>,
    shards: (Vec<Bound<'py, PyAny>>, u64, u64),
    fallback: &Bound<'py, PyAny>,
) -> Outcome<(Reader, ByPosition<Bound<'py, PyTuple>>, ByPosition<usize>)> {
    let (dims, rank, world) = shards;
    let given =
        |cuts: &[Bound<'py, PyAny>], at: usize| cuts.get(at).filter(|cut| !cut.is_none()).cloned();
    let mut slices = Vec::with_capacity(numbers.len());
    let (mut remaining_indices, mut box_counts) = (Vec::new(), Vec::new());
    for (at, number) in numbers.into_iter().enumerate() {
        let entry = reader.file.entry(number)?;
        let (index, dim) = (given(&indices, at), given(&dims, at));
        if index.is_none() && dim.is_none() {
            slices.push((number, None));
        } else if let Some(steps) = index.and_then(|index| steps_of(&entry.shape, &index)) {
            slices.push((number, Some(steps.iter().map(|(ends, _)| *ends).collect())));
            if steps.iter().any(|(_, stride)| *stride != Some(1)) {
                let remaining = steps.iter().map(|(_, stride)| remaining_index(py, *stride));
                let remaining = remaining.collect::<PyResult<Vec<_>>>()?;
                remaining_indices.push((at, PyTuple::new(py, remaining)?));
            }
        } else if let Some(dim) = dim.and_then(|dim| dim.extract().ok())
            && let Some(slice) = shard_of(entry, dim, rank, world)
        {
            slices.push((number, Some(slice)));
        } else {
            let (boxes, remaining): BoxesAndIndex<'py> = fallback.call1((at,))?.extract()?;
            if boxes.len() != 1 {
                box_counts.push((at, boxes.len()));
            }
            slices.extend(boxes.into_iter().map(|ranges| (number, Some(ranges))));
            if !remaining.is_empty() {
                remaining_indices.push((at, remaining));
            }
        }
    }
    Ok((reader.sliced(slices)?, remaining_indices, box_counts))
}

/// Returns the same file with the bytes of each tensor as a tensor.
#[pyfunction]
pub fn as_bytes(reader: &Reader) -> Outcome<Reader> {
    Ok(reader.of_same(reader.file.as_bytes()?))
}

/// Returns tensors together with those that must be loaded with them: if the file can only be read
/// front to back, all before them, from the one after `passed` on.
#[pyfunction]
pub fn with_earlier(reader: &Reader, numbers: Vec<usize>, passed: Option<usize>) -> Vec<usize> {
    if reader.file.is_seekable() {
        return numbers;
    }
    let (order, places) = reader.order.get_or_init(|| reader.file.order());
    let place = |number: usize| places.get(number).map_or(0, |place| place + 1);
    let end = numbers.iter().map(|&number| place(number)).max().unwrap_or(0);
    match order.get(passed.map_or(0, place)..end) {
        Some(found) if !found.is_empty() => found.to_vec(),
        // They were passed before: reading them is an error.
        _ => numbers,
    }
}

/// A call that reads tensors by several loads.
#[pyclass(frozen, module = "tensorizer._C")]
pub struct Announcement {
    _wanted: Vec<WantedRead>,
}

/// Announces that several loads will together read these tensors, as long as the result lives. So
/// a cache keeps the file if together they are at least half of it.
#[pyfunction]
pub fn announce(reader: &Reader, numbers: Vec<usize>) -> Outcome<Announcement> {
    Ok(Announcement { _wanted: reader.file.announce(&numbers)? })
}

/// Returns the part that a rank has of a tensor cut in one dimension; None if it has no such
/// dimension.
fn shard_of(entry: &Entry, dim: i64, rank: u64, world: u64) -> Option<SliceBounds> {
    let dim = resolve_index(dim, entry.shape.len() as u64)?;
    let ranges = (0..).zip(&entry.shape).map(|(at, &len)| {
        if at != dim {
            return (0, len);
        }
        let each = len.div_ceil(world.max(1));
        let start = rank.saturating_mul(each).min(len);
        (start, start.saturating_add(each).min(len))
    });
    Some(ranges.collect())
}

/// Returns the steps of an index in each dimension; None if it is not handled here, or is no index.
fn steps_of(shape: &[u64], index: &Bound<'_, PyAny>) -> Option<Vec<IndexStep>> {
    let Ok(indices) = index.cast::<PyTuple>() else {
        return steps_of_items(shape, std::slice::from_ref(index));
    };
    let items: Vec<_> = indices.iter().collect();
    if let [dim, start, stop] = items.as_slice()
        && !items.iter().any(|item| is_ellipsis(item) || item.is_instance_of::<PySlice>())
    {
        return steps_of_range(shape, dim, start, stop);
    }
    steps_of_items(shape, &items)
}

/// Returns the same for an index of a dimension, a first index and an end.
fn steps_of_range(
    shape: &[u64],
    dim: &Bound<'_, PyAny>,
    start: &Bound<'_, PyAny>,
    stop: &Bound<'_, PyAny>,
) -> Option<Vec<IndexStep>> {
    let dim = resolve_index(number_of(dim)?, shape.len() as u64)?;
    let steps = (0..).zip(shape).map(|(at, &len)| {
        if at != dim {
            return Some(((0, len), Some(1)));
        }
        let (start, stop) = (end_of(start, len, 0)?, end_of(stop, len, len)?);
        Some(((start, stop.max(start)), Some(1)))
    });
    steps.collect()
}

/// Returns the same for the items of an index in brackets.
fn steps_of_items(shape: &[u64], items: &[Bound<'_, PyAny>]) -> Option<Vec<IndexStep>> {
    let ellipses = items.iter().filter(|item| is_ellipsis(item)).count();
    let missing = shape.len().checked_sub(items.len() - ellipses)?;
    if ellipses > 1 {
        return None;
    }
    let mut steps = Vec::with_capacity(shape.len());
    let mut dims = shape.iter().copied();
    let whole = |len| ((0, len), Some(1));
    for item in items {
        if is_ellipsis(item) {
            steps.extend(dims.by_ref().take(missing).map(whole));
        } else {
            steps.push(step_of(dims.next()?, item)?);
        }
    }
    steps.extend(dims.map(whole));
    Some(steps)
}

fn step_of(len: u64, item: &Bound<'_, PyAny>) -> Option<IndexStep> {
    if let Ok(slice) = item.cast::<PySlice>() {
        let part = |name| slice.getattr(name).ok();
        let (start, stop) = (end_of(&part("start")?, len, 0)?, end_of(&part("stop")?, len, len)?);
        let step = part("step")?;
        let stride = if step.is_none() { 1 } else { u64::try_from(number_of(&step)?).ok()? };
        return (stride > 0).then_some(((start, stop.max(start)), Some(stride)));
    }
    resolve_index(number_of(item)?, len).map(|index| ((index, index + 1), None))
}

/// Resolves an end of a range in a dimension. None if it is outside of the dimension.
fn end_of(end: &Bound<'_, PyAny>, len: u64, default: u64) -> Option<u64> {
    if end.is_none() {
        return Some(default);
    }
    let end = number_of(end)?;
    let from_back = len.checked_sub(end.unsigned_abs())?;
    Some(if end < 0 { from_back } else { end.unsigned_abs() })
}

fn is_ellipsis(item: &Bound<'_, PyAny>) -> bool {
    item.is(item.py().Ellipsis())
}

/// Returns the value of an exact `int`. Other types may be indices too, and booleans are none.
fn number_of(item: &Bound<'_, PyAny>) -> Option<i64> {
    item.is_exact_instance_of::<PyInt>().then(|| item.extract().ok()).flatten()
}

/// Resolves an index into `count` items: a negative one counts from the end. None if it is out of
/// range.
fn resolve_index(number: i64, count: u64) -> Option<u64> {
    let from_back = || count.checked_sub(number.unsigned_abs());
    let position = u64::try_from(number).ok().or_else(from_back)?;
    (position < count).then_some(position)
}
