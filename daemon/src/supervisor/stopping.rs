//! Engines that are to leave for good: asked, and killed if they do not.

use super::Supervisor;
use super::engines::{Engine, EngineState};
use crate::engine_link::ToEngine;

impl Supervisor {
    /// Asks every engine to leave.
    pub(super) fn stop_engines(&mut self) {
        for index in 0..self.engines.len() {
            self.disarm(index);
            if let Some(engine) = self.engines.get_mut(index) {
                engine.state = EngineState::Stopping;
            }
            self.tell(index, &ToEngine::Stop, Vec::new());
            self.settle_stop(index);
        }
    }

    /// Is it stopped, if it is to be?
    pub(super) fn settle_stop(&mut self, index: usize) {
        if let Some(engine) = self.engines.get_mut(index)
            && engine.state == EngineState::Stopping
            && engine.launches().next().is_none()
            && engine.leaving.is_empty()
        {
            engine.state = EngineState::Stopped;
        }
    }

    /// Kills every engine that has not left.
    pub(super) fn kill_engines(&mut self) {
        for index in 0..self.engines.len() {
            let launches = self.engines.get(index).map(Engine::launches);
            for launch in launches.into_iter().flatten() {
                self.fence_process(index, launch, "did not stop in time");
            }
        }
    }
}
