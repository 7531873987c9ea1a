//! A recorded session, understood a second time: by the transport's own parser, and by rules of its own.
