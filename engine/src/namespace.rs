//! The names of namespaces. One list for the whole process, so that a number means the same name in every cache. Their
//! settings are in `mode`, what is counted of them in `usage`; neither knows what a value is.

pub(crate) mod mode;
pub(crate) mod usage;

pub use mode::{NamespaceMode, NamespaceSettings};

use crate::key::{NAMESPACE_BYTES_MAX, Namespace};
use crate::{Error, Result};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

/// Namespaces that one process can have. They are never forgotten, so the number is bounded.
pub(crate) const NAMESPACES_MAX: usize = 65_536;

/// Numbers for names. Not on the way of a hit: keys carry the number.
pub(crate) struct Namespaces(RwLock<Names>);

static NAMESPACES: LazyLock<Namespaces> = LazyLock::new(Namespaces::new);

struct Names {
    by_number: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, u32>,
}

impl Namespaces {
    /// Those of this process.
    pub(crate) fn of_process() -> &'static Self {
        &NAMESPACES
    }

    fn new() -> Self {
        let empty: Arc<str> = "".into();
        Self(RwLock::new(Names { by_number: vec![empty.clone()], numbers: HashMap::from([(empty, 0)]) }))
    }

    /// The namespace of a name, made when it is first asked for.
    pub(crate) fn get(&self, name: &str) -> Result<Namespace> {
        if name.len() > NAMESPACE_BYTES_MAX {
            return Err(Error::Namespace {
                name: name.to_owned(),
                allowed: format!("a name has at most {NAMESPACE_BYTES_MAX} bytes, this one {}", name.len()),
            });
        }
        // A panic while the lock was held cannot have left the maps in disagreement: both are changed below
        // without anything in between that panics.
        let names = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(&number) = names.numbers.get(name) {
            return Ok(Namespace(number));
        }
        drop(names);
        let mut names = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(&number) = names.numbers.get(name) {
            return Ok(Namespace(number));
        }
        if names.by_number.len() == NAMESPACES_MAX {
            return Err(Error::Namespace {
                name: name.to_owned(),
                allowed: format!("a process has at most {NAMESPACES_MAX} namespaces"),
            });
        }
        let number = names.by_number.len() as u32;
        let name: Arc<str> = name.into();
        names.by_number.push(name.clone());
        names.numbers.insert(name, number);
        Ok(Namespace(number))
    }

    /// The name of a namespace.
    pub(crate) fn name(&self, namespace: Namespace) -> Arc<str> {
        let names = self.0.read().unwrap_or_else(PoisonError::into_inner);
        // Numbers are given out by `get` alone, and names are never forgotten.
        names.by_number[namespace.0 as usize].clone()
    }
}
