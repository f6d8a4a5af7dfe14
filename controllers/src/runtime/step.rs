//! One step of an object that goes through phases: the state that it shows, and the writes before and after it is shown.

use std::time::Duration;

use super::{decision::Decision, effect::Effect};

/// A step. `S`: the state to show.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step<S> {
    /// The state to show; `None`: the present one stays.
    pub shown: Option<S>,
    /// Writes before it is shown.
    pub before: Vec<Effect>,
    /// Writes after it is shown.
    pub after: Vec<Effect>,
    /// Time after which the object is reconciled even if nothing changes.
    pub wake: Option<Duration>,
}

impl<S> Default for Step<S> {
    fn default() -> Self {
        Self { shown: None, before: Vec::new(), after: Vec::new(), wake: None }
    }
}

impl<S> Step<S> {
    /// Returns the step that shows a state.
    pub(crate) fn show(shown: S) -> Self {
        Self { shown: Some(shown), ..Self::default() }
    }

    /// Adds writes before the state is shown.
    pub(crate) fn before(mut self, effects: impl IntoIterator<Item = Effect>) -> Self {
        self.before.extend(effects);
        self
    }

    /// Adds writes after the state is shown.
    pub(crate) fn after(mut self, effects: impl IntoIterator<Item = Effect>) -> Self {
        self.after.extend(effects);
        self
    }

    /// Sets the time after which the object is reconciled.
    pub(crate) fn wake(self, time: Duration) -> Self {
        Self { wake: Some(time), ..self }
    }

    /// Returns the step as a decision. `show` adds the write of the state.
    pub(crate) fn decided<E>(self, show: impl FnOnce(S, &mut Decision) -> Result<(), E>) -> Result<Decision, E> {
        let mut decision = Decision { effects: self.before, wake_after: self.wake };
        self.shown.map(|shown| show(shown, &mut decision)).transpose()?;
        decision.effects.extend(self.after);
        Ok(decision)
    }
}
