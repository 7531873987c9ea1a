//! Frames under way, in buffers that are used again.

/// A frame on its way to an engine.
#[derive(Debug, Default)]
pub struct FrameSlot {
    bytes: Vec<u8>,
    /// How many of them are the frame's.
    pub len: u32,
    /// The engine that sent it.
    pub from: u32,
    /// The engine it goes to, and its node's port of the switch.
    pub to: u32,
    pub port: u32,
    /// DSCP class: 1 is high.
    pub class: u8,
}

impl FrameSlot {
    /// The frame.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len as usize]
    }

    /// The frame, to harm it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len as usize]
    }

    /// The whole buffer, to be written.
    pub fn buffer(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

/// All frames under way.
#[derive(Debug)]
pub struct Frames {
    slots: Vec<FrameSlot>,
    free: Vec<u32>,
    longest: usize,
}

impl Frames {
    /// For frames of at most `longest` bytes.
    pub fn new(longest: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            longest,
        }
    }

    /// A buffer, holding what was in it before.
    pub fn take(&mut self) -> u32 {
        if let Some(index) = self.free.pop() {
            return index;
        }
        self.slots.push(FrameSlot {
            bytes: vec![0; self.longest],
            ..FrameSlot::default()
        });
        self.slots.len() as u32 - 1
    }

    /// A second one like this.
    pub fn copy(&mut self, index: u32) -> u32 {
        let copy = self.take();
        let mut bytes = std::mem::take(&mut self.slots[copy as usize].bytes);
        let original = &self.slots[index as usize];
        bytes[..original.len as usize].copy_from_slice(original.bytes());
        self.slots[copy as usize] = FrameSlot { bytes, ..*original };
        copy
    }

    /// The frame is over.
    pub fn free(&mut self, index: u32) {
        self.free.push(index);
    }

    pub fn get(&self, index: u32) -> &FrameSlot {
        &self.slots[index as usize]
    }

    pub fn get_mut(&mut self, index: u32) -> &mut FrameSlot {
        &mut self.slots[index as usize]
    }
}
