//! Fault points: places where a test can make the core fail (cargo feature `faults`, which no released build has).
//!
//! One static table of atomics, and the macro `fault_point!`, which expands to nothing without the feature.

#[cfg(feature = "faults")]
pub use table::{Action, SetError, hits, names, set};

/// Fails here if a test has requested it: returns `Err` from the function (not in the form `panic`), panics or waits.
/// The name must be in the table.
macro_rules! fault_point {
    ($name:literal) => {
        #[cfg(feature = "faults")]
        crate::faults::table::hit($name)?;
    };
    (panic $name:literal) => {
        #[cfg(feature = "faults")]
        crate::faults::table::hit($name).expect("a point that cannot return an error has no such action");
    };
}
pub(crate) use fault_point;

#[cfg(feature = "faults")]
pub(crate) mod table {
    use crate::error::{Error, Result};
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
    use std::time::Duration;

    /// What a point does when it is reached.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Action {
        /// Nothing; ends a pause.
        Off = 0,
        /// [`Error::Injected`].
        Error = 1,
        /// A panic.
        Panic = 2,
        /// Waits until the point is set to something else.
        Pause = 3,
        /// The operation reports success but does nothing.
        Leak = 4,
    }

    impl Action {
        /// `off`, `error`, `panic`, `pause` or `leak`.
        pub fn parse(word: &str) -> Option<Self> {
            let all =
                [("off", Self::Off), ("error", Self::Error), ("panic", Self::Panic), ("pause", Self::Pause)];
            all.into_iter().chain([("leak", Self::Leak)]).find(|(name, _)| *name == word).map(|(_, it)| it)
        }
    }

    /// Why a point cannot be set.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum SetError {
        /// No point has the name.
        NoSuchPoint,
        /// The point does not support the action: an error would require undoing a change, or nothing can leak.
        NoSuchAction,
    }

    struct Point {
        name: &'static str,
        actions: &'static [Action],
        action: AtomicU8,
        /// Number of passes until the point acts; it acts once.
        n_left: AtomicU64,
        n_hits: AtomicU64,
    }

    /// Every action except a leak: for places where the call can still be rejected.
    const ENTRY: &[Action] = &[Action::Off, Action::Error, Action::Panic, Action::Pause];
    /// Actions in the middle of work that returns no error.
    const INSIDE: &[Action] = &[Action::Off, Action::Panic, Action::Pause];
    const LEAKS: &[Action] = &[Action::Off, Action::Error, Action::Panic, Action::Pause, Action::Leak];

    const fn point(name: &'static str, actions: &'static [Action]) -> Point {
        let (action, n_left, n_hits) = (AtomicU8::new(0), AtomicU64::new(0), AtomicU64::new(0));
        Point { name, actions, action, n_left, n_hits }
    }

    static TABLE: [Point; 35] = [
        point("seq.acquire", ENTRY),
        point("seq.release", LEAKS),
        point("seq.set_sampler", ENTRY),
        point("seq.set_lora", ENTRY),
        point("lora.load", ENTRY),
        point("lora.unload", ENTRY),
        point("decode.begin", ENTRY),
        point("decode.prepare", ENTRY),
        point("decode.placed", ENTRY),
        point("decode.layer", INSIDE),
        // On every rank except the first, at the beginning of a pass.
        point("decode.rank", ENTRY),
        point("decode.forward", ENTRY),
        point("decode.logits", ENTRY),
        point("sampler.row", INSIDE),
        point("decode.sampled", ENTRY),
        point("decode.commit", ENTRY),
        point("kv.seq_rm", ENTRY),
        point("kv.seq_cp", ENTRY),
        point("kv.seq_keep", ENTRY),
        point("kv.seq_add", ENTRY),
        point("kv.node_cache", ENTRY),
        point("kv.node_attach", ENTRY),
        point("kv.node_relink", ENTRY),
        point("kv.node_keep_state", ENTRY),
        point("kv.node_drop_state", ENTRY),
        point("kv.node_split", ENTRY),
        point("kv.node_trim", ENTRY),
        point("kv.node_export", ENTRY),
        point("kv.node_import", ENTRY),
        point("kv.node_export_state", ENTRY),
        point("kv.node_import_state", ENTRY),
        point("weights.replace", ENTRY),
        // A panic at one of these leaves the KV cache's state half-changed, so the context is lost.
        point("kv.change", INSIDE),
        point("kv.prepare", INSIDE),
        point("kv.commit", INSIDE),
    ];

    /// The points, in the order of the table.
    pub fn names() -> impl Iterator<Item = &'static str> {
        TABLE.iter().map(|point| point.name)
    }

    /// How often the point was passed since the process began.
    pub fn hits(name: &str) -> Option<u64> {
        find(name).map(|point| point.n_hits.load(Ordering::SeqCst))
    }

    /// Makes the point perform `action` once, the `nth` time (from 1) that it is passed from now on.
    ///
    /// Errors: the point does not exist, or does not support the action.
    pub fn set(name: &str, action: Action, nth: u64) -> Result<(), SetError> {
        let point = find(name).ok_or(SetError::NoSuchPoint)?;
        if !point.actions.contains(&action) {
            return Err(SetError::NoSuchAction);
        }
        point.n_left.store(nth.max(1), Ordering::SeqCst);
        point.action.store(action as u8, Ordering::SeqCst);
        Ok(())
    }

    fn find(name: &str) -> Option<&'static Point> {
        TABLE.iter().find(|point| point.name == name)
    }

    /// Passes a point. Returns true if it must leak.
    pub(crate) fn hit(name: &'static str) -> Result<bool> {
        let point = find(name).expect("every point is in the table");
        point.n_hits.fetch_add(1, Ordering::SeqCst);
        let action = point.action.load(Ordering::SeqCst);
        if action == Action::Off as u8 || point.n_left.fetch_sub(1, Ordering::SeqCst) != 1 {
            return Ok(false);
        }
        while point.action.load(Ordering::SeqCst) == Action::Pause as u8 {
            std::thread::sleep(Duration::from_millis(1));
        }
        point.action.store(Action::Off as u8, Ordering::SeqCst);
        if action == Action::Panic as u8 {
            panic!("fault point {name}");
        }
        if action == Action::Error as u8 {
            Err(Error::Injected { point: name })
        } else {
            Ok(action == Action::Leak as u8)
        }
    }
}
