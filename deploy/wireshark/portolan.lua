-- Portolan in Wireshark: what docs/spec/wire.md lays out and docs/spec/transport.md means. Made for Wireshark 4.0 (Lua 5.2);
-- docs/wireshark.md says how to install and use it.
--
-- Each frame goes through three steps, which are the parts of this file:
--
--   read    the frame's bytes, as a Lua string, become tables: `frame`, its `chunks`, and in each chunk a list of `items`
--           {field, offset, length}. Knows nothing of Wireshark. Checks in the order of wire.md §6 and with the verdicts of
--           transport/src/wire/, so `frame.malformed` is the name under which an engine counts such a frame, or nil. Nothing is
--           taken from the string before it is known to be there; every loop is bounded by the frame's length.
--   link    on the first visit of a frame: which stream its chunks belong to, whether they were sent before, what they answer.
--           Kept per frame in a `record`, per chunk in a `link`; an answer writes itself into the links of what it answers, so
--           a second pass (Wireshark, tshark -2) also sees forward. Frames that an engine would drop are not linked.
--   show    adds items and links to Wireshark's tree, fills the columns.
--
-- Offsets count from 0, as in the specification. Numbers of 32 bits are serial (RFC 1982).

local bxor, band, rshift = bit32.bxor, bit32.band, bit32.rshift
local byte, format, floor = string.byte, string.format, math.floor
local unpack = Struct.unpack

local portolan = Proto("portolan", "Portolan")

-- ---- names, wire.md §2 to §4 and §7 ----

local ETHERTYPE, MAGIC, VERSION = 0x88B5, 0x504C, 1
local HEADER_LEN, CRC_AT = 48, 44
local BARE_MAGIC, BARE_LEN, BARE_CRC_AT = 0x5042, 40, 36 -- bare frames, wire.md §2.1
local FRAME_MAX, PADDED_MAX, PORTS, NAME_MAX, RANGES_MAX, WORDS_MAX = 65535, 64, 256, 64, 8, 8
local RUNS_MAX = 1024 -- messages in all RUNs of a frame
local PAYLOAD, START, HIGH, TAG = 1, 2, 4, 64
local EXACT = 2
local DATA = 6 -- the kind of a bare frame's chunk

local REASONS = {
    truncated = "the frame is shorter than its header",
    too_long = "the frame is longer than 65535 bytes",
    magic = "the frame does not start with our magic number",
    version = "the frame's wire version is not one this build speaks",
    header_length = "the header length is impossible or leaves the first buffer",
    header_crc = "the checksum over frame and chunk headers does not match",
    chunk_length = "a chunk header's length is impossible",
    chunk_count = "the chunk count does not match the header length",
    chunk_field = "a chunk header is too short for its kind or holds an impossible value",
    payload_length = "the payloads are longer than the frame",
    trailing = "bytes follow the last payload",
}
-- Not the frame's fault: the capture holds only its beginning.
local CUT = "cut"

local KIND_NAMES = {
    "HELLO", "HELLO-ACK", "RESET", "EAGER", "RTS", "DATA", "CTS", "MSGEND", "ACK", "NACK", "READY", "PROBE", "MSGDROP",
    "DROP-CONFIRM", "NULL", "NULL-ACK", "PORT-CLOSED", "CLOSE", "CLOSED", "REFUSED", "RESUME", "PATH-PROBE", "PATH-ACK", "NEXT",
    "RUN",
}
local RESET_REASONS = { "incarnation", "cluster", "version", "policy" }
local RESET_DETAILS = { [0] = "none", "recovery", "ack_rule" }
local NACK_REASONS = { "did not come", "no buffer", "corrupt" }
local DROP_REASONS = {
    "port closed", "too long", "deadline", "peer restarted", "unreachable", "cancelled", "dropped", "bad memory", "no route",
    "incompatible", "no resources", "refused",
}
local RECOVERIES = { "go-back-n", "whole message", "selective" }
local ACK_RULES = { "cumulative", "exact" }
local ORDERS = { "by number", "by arrival" }
local VERDICTS = { [0] = "Bad", "Good", "Unverified" }
local BAD, GOOD, UNVERIFIED = 0, 1, 2

-- ---- filter fields ----

local F = {}

local function field(make, abbreviation, ...)
    F[abbreviation] = make("portolan." .. abbreviation, ...)
end

local function fields(make, base_or_nil, ...)
    local all = { ... }
    for i = 1, #all, 2 do field(make, all[i], all[i + 1], base_or_nil) end
end

local BYTES_UNIT = { " byte", " bytes" }
local u8, u16, u32, u64 = ProtoField.uint8, ProtoField.uint16, ProtoField.uint32, ProtoField.uint64

field(u16, "magic", "Magic", base.HEX)
fields(u8, base.DEC, "version", "Version", "chunk_count", "Chunks", "src_queue", "Sending engine", "dst_queue", "Receiving engine")
field(u16, "header_len", "Header area", base.UNIT_STRING, BYTES_UNIT)
field(u16, "flags", "Flags", base.HEX)
field(ProtoField.bool, "flags.crowded", "CROWDED: requests to the sender travel without data", 16, nil, 0x0001)
field(ProtoField.bool, "flags.return_credit", "RETURN-CREDIT: unused credit is wanted back", 16, nil, 0x0002)
field(u16, "flags.reserved", "Reserved", base.HEX, nil, 0xfffc)
fields(u16, base.DEC, "src_node", "Sending node", "dst_node", "Receiving node", "node", "Node",
    "held", "Held (units of 256 ns)")
fields(u32, base.HEX, "src_incarnation", "Sender's incarnation (low half)", "dst_incarnation", "Receiver's incarnation (low half)")
field(u32, "association", "Association (of both incarnations and the engine epoch)", base.HEX)
field(u8, "bare.flags", "Flags", base.HEX)
fields(u32, base.DEC, "engine_epoch", "Engine epoch", "sent_buffers", "Sent buffers", "credit_limit", "Credit limit")
field(u32, "sent_at", "Sent at (sender's clock)", base.UNIT_STRING, { " ns", " ns" })
field(u32, "echo", "Echo (newest clock received)", base.UNIT_STRING, { " ns", " ns" })
field(u32, "header_crc", "Header CRC32C", base.HEX)
field(u8, "header_crc.status", "Header CRC32C status", base.DEC, VERDICTS)
field(ProtoField.string, "malformed", "Malformed")

field(ProtoField.none, "chunk", "Chunk")
field(u8, "chunk.kind", "Kind", base.DEC, KIND_NAMES)
field(u8, "chunk.flags", "Flags", base.HEX)
for bit, name in ipairs { "PAYLOAD", "START", "HIGH", "ACK-NOW", "ACK-LAZY", "UNASKED", "TAG" } do
    field(ProtoField.bool, "chunk." .. name:lower():gsub("-", "_"), name, 8, nil, 2 ^ (bit - 1))
end
field(u8, "chunk.reserved", "Reserved", base.HEX, nil, 0x80)
field(u16, "chunk.length", "Chunk header", base.UNIT_STRING, BYTES_UNIT)
field(u16, "payload.length", "Payload length", base.UNIT_STRING, BYTES_UNIT)
field(u16, "run.count", "Messages", base.DEC)
field(u32, "payload.crc", "Payload CRC32C", base.HEX)
field(u8, "payload.crc.status", "Payload CRC32C status", base.DEC, VERDICTS)
fields(ProtoField.bytes, base.NONE, "payload", "Payload", "reserved", "Reserved", "padding", "Padding",
    "chunk.more", "Fields of a newer version", "chunk.unknown", "Fields of an unknown kind")

fields(u16, base.DEC, "sender_port", "Sender's port", "receiver_port", "Receiver's port", "port", "Port")
fields(u32, base.DEC, "stream_epoch", "Stream epoch", "number", "Message number", "start", "Start (oldest number not settled)",
    "base", "Base (next number to commit)", "expected", "Expected number", "next", "Next number")
field(u64, "tag", "Tag", base.HEX)
for _, it in ipairs { { "total", "Message length" }, { "offset", "Offset" }, { "granted", "Granted up to" },
    { "missing.from", "Missing from" }, { "missing.to", "Missing up to" } } do
    field(u32, it[1], it[2], base.UNIT_STRING, BYTES_UNIT)
end
field(u8, "missing.count", "Missing ranges", base.DEC)
field(ProtoField.bytes, "received", "Received beyond base (bitmap)", base.NONE)
field(ProtoField.string, "received.numbers", "Received numbers")
field(u8, "nack.reason", "Reason", base.DEC, NACK_REASONS)
field(u8, "drop.reason", "Reason", base.DEC, DROP_REASONS)
field(u8, "delivered", "Delivered", base.DEC, { [0] = "no", "yes" })
field(u16, "size", "Frame size", base.UNIT_STRING, BYTES_UNIT)
field(u32, "nonce", "Nonce", base.HEX)
fields(u32, base.HEX, "reset.src_incarnation", "Offending frame's source", "reset.dst_incarnation", "Offending frame's destination")
field(u8, "reset.reason", "Reason", base.DEC, RESET_REASONS)
field(u8, "reset.detail", "Detail", base.DEC, RESET_DETAILS)
fields(u64, base.HEX, "hello.incarnation", "Incarnation", "hello.echo", "Echo (receiver's incarnation)", "hello.cluster", "Cluster")
fields(u8, base.DEC, "hello.wire_min", "Lowest wire version", "hello.wire_max", "Highest wire version",
    "hello.queues", "Engines of the node", "hello.name_len", "Length of the name")
field(u16, "hello.max_frame", "Longest frame", base.UNIT_STRING, BYTES_UNIT)
field(u16, "hello.window", "Window", base.UNIT_STRING, { " message", " messages" })
field(u8, "hello.recovery", "Recovery", base.DEC, RECOVERIES)
field(u8, "hello.ack_rule", "Acknowledgement rule", base.DEC, ACK_RULES)
field(u8, "hello.order", "Order of commits", base.DEC, ORDERS)
field(u8, "hello.unasked", "Taken unasked of a long message (units of 256 bytes)", base.DEC)
field(ProtoField.string, "hello.name", "Node's name")
field(u32, "hello.features", "Features", base.HEX)
field(ProtoField.bool, "hello.features.next", "NEXT: it reads NEXT", 32, nil, 1)
field(ProtoField.bool, "hello.features.run", "RUN: it reads RUN, if it reads NEXT", 32, nil, 2)
field(ProtoField.bool, "hello.features.bare", "BARE: it reads bare frames", 32, nil, 4)

-- Found by comparing frames.
field(ProtoField.string, "stream", "Stream")
fields(u32, base.DEC, "stream.index", "Stream index", "commits", "Messages committed")
fields(ProtoField.bool, base.NONE, "retransmission", "Retransmission", "repeated", "Asked again before an answer",
    "duplicate", "The same frame again")
for _, it in ipairs { { "sent_before_in", "Sent before in frame" }, { "asked_before_in", "Asked before in frame" },
    { "duplicate_of", "The same as frame" }, { "echoed", "Echoes frame" }, { "first_sent_in", "First sent in frame" } } do
    field(ProtoField.framenum, it[1], it[2], base.NONE)
end
field(ProtoField.framenum, "answered_in", "Answered in frame", base.NONE, frametype.RESPONSE)
field(ProtoField.framenum, "answers", "Answers frame", base.NONE, frametype.REQUEST)
field(ProtoField.framenum, "committed_in", "Committed in frame", base.NONE, frametype.ACK)
for _, it in ipairs { { "answer_time", "Time from request to answer" }, { "commit_time", "Time from first sending to commit" },
    { "echo_time", "Time since the echoed frame" } } do
    field(ProtoField.relative_time, it[1], it[2])
end

portolan.fields = F

local E = {
    malformed = ProtoExpert.new("portolan.expert.malformed", "Malformed frame", expert.group.MALFORMED, expert.severity.ERROR),
    payload_crc = ProtoExpert.new("portolan.expert.payload_crc", "Corrupt payload", expert.group.CHECKSUM, expert.severity.ERROR),
    unknown = ProtoExpert.new("portolan.expert.unknown_kind", "Unknown kind", expert.group.UNDECODED, expert.severity.WARN),
    cut = ProtoExpert.new("portolan.expert.cut", "Cut off by the capture", expert.group.PROTOCOL, expert.severity.NOTE),
    again = ProtoExpert.new("portolan.expert.retransmission", "Retransmission", expert.group.SEQUENCE, expert.severity.NOTE),
    asked = ProtoExpert.new("portolan.expert.repeated", "Asked again", expert.group.SEQUENCE, expert.severity.NOTE),
    duplicate = ProtoExpert.new("portolan.expert.duplicate", "The same frame again", expert.group.SEQUENCE, expert.severity.NOTE),
    refusal = ProtoExpert.new("portolan.expert.refusal", "Refusal", expert.group.RESPONSE_CODE, expert.severity.NOTE),
}
portolan.experts = E

-- ---- chunk kinds ----

-- Field and bytes, field and bytes, …; values of up to four bytes are kept in the chunk under the field's name.
local STREAM = { "sender_port", 2, "receiver_port", 2, "stream_epoch", 4 }

local function stream(...)
    local layout = { ... }
    for i = #STREAM, 1, -1 do table.insert(layout, 1, STREAM[i]) end
    return layout
end

local HELLO = {
    "hello.incarnation", 8, "hello.echo", 8, "hello.cluster", 8, "hello.wire_min", 1, "hello.wire_max", 1, "hello.queues", 1,
    "hello.name_len", 1, "hello.max_frame", 2, "hello.window", 2, "hello.recovery", 1, "hello.ack_rule", 1, "hello.order", 1,
    "hello.unasked", 1,
}
local PATH = { "size", 2, "reserved", 2, "nonce", 4 }

local KINDS = {
    HELLO = { layout = HELLO },
    ["HELLO-ACK"] = { layout = HELLO },
    RESET = { layout = { "reset.src_incarnation", 4, "reset.dst_incarnation", 4, "reset.reason", 1, "reset.detail", 1, "reserved", 2 },
        refuses = true },
    EAGER = { layout = stream("number", 4, "tag", 8), forward = true, payload = true, start = true },
    NEXT = { layout = {}, forward = true, payload = true },
    RUN = { layout = {}, forward = true, payload = true },
    RTS = { layout = stream("number", 4, "tag", 8, "total", 4), forward = true, payload = true, start = true },
    DATA = { layout = stream("number", 4, "offset", 4), forward = true, payload = true },
    CTS = { layout = stream("number", 4, "granted", 4, "missing.count", 1, "reserved", 3) },
    MSGEND = { layout = stream("number", 4) },
    ACK = { layout = stream("base", 4) },
    NACK = { layout = stream("expected", 4, "nack.reason", 1, "reserved", 3), refuses = true },
    READY = { layout = stream("number", 4) },
    PROBE = { layout = stream("number", 4, "total", 4), forward = true, start = true },
    MSGDROP = { layout = stream("number", 4, "drop.reason", 1, "reserved", 3), refuses = true },
    ["DROP-CONFIRM"] = { layout = stream("number", 4), forward = true },
    NULL = { layout = stream("number", 4), forward = true, start = true },
    ["NULL-ACK"] = { layout = stream("number", 4, "delivered", 1, "reserved", 3) },
    ["PORT-CLOSED"] = { layout = stream("base", 4), refuses = true },
    CLOSE = { layout = stream("next", 4), forward = true },
    CLOSED = { layout = stream() },
    REFUSED = { layout = stream(), refuses = true },
    RESUME = { layout = stream("base", 4) },
    ["PATH-PROBE"] = { layout = PATH },
    ["PATH-ACK"] = { layout = PATH },
}
for _, name in pairs(KIND_NAMES) do KINDS[name].name = name end

-- ---- CRC32C ----

-- Four bytes at a time: by linearity, going over the low and the high half of a word is a look-up each.
local CRC_LOW, CRC_HIGH

local function prepare_crc()
    local function advance(crc, bytes)
        for _ = 1, 8 * bytes do
            crc = crc % 2 == 1 and bxor(rshift(crc, 1), 0x82F63B78) or rshift(crc, 1)
        end
        return crc
    end
    CRC_LOW, CRC_HIGH = { [0] = 0 }, { [0] = 0 }
    for bit = 0, 15 do
        local one = 2 ^ bit
        local low, high = advance(one, 4), advance(one * 65536, 4)
        for i = 0, one - 1 do
            CRC_LOW[one + i], CRC_HIGH[one + i] = bxor(CRC_LOW[i], low), bxor(CRC_HIGH[i], high)
        end
    end
end

-- Over `len` bytes at `at`, which the caller knows to be there, going on from `crc`.
local function crc_over(crc, raw, at, len)
    local LOW, HIGH = CRC_LOW, CRC_HIGH
    local low
    while len >= 16 do
        local a, b, c, d = unpack("<I4I4I4I4", raw, at + 1)
        crc = bxor(crc, a)
        low = crc % 65536
        crc = bxor(LOW[low], HIGH[(crc - low) / 65536], b)
        low = crc % 65536
        crc = bxor(LOW[low], HIGH[(crc - low) / 65536], c)
        low = crc % 65536
        crc = bxor(LOW[low], HIGH[(crc - low) / 65536], d)
        low = crc % 65536
        crc = bxor(LOW[low], HIGH[(crc - low) / 65536])
        at, len = at + 16, len - 16
    end
    for i = at + 1, at + len do
        -- A byte's table is every 256th of the high half's.
        local index = band(bxor(crc, byte(raw, i)), 255)
        crc = bxor(rshift(crc, 8), HIGH[index * 256])
    end
    return crc
end

local function crc32c(raw, at, len)
    return bxor(crc_over(0xFFFFFFFF, raw, at, len), 0xFFFFFFFF)
end

-- Over the header area, its own four bytes taken as zero.
local function header_crc(raw, len)
    local crc = crc_over(0xFFFFFFFF, raw, 0, CRC_AT)
    crc = crc_over(crc, "\0\0\0\0", 0, 4)
    return bxor(crc_over(crc, raw, HEADER_LEN, len - HEADER_LEN), 0xFFFFFFFF)
end

-- ---- read ----

-- `size` bytes (1 to 4) at `at`, which the caller knows to be there.
local function uint(raw, at, size)
    local a, b, c, d = byte(raw, at + 1, at + size)
    if size == 4 then return ((a * 256 + b) * 256 + c) * 256 + d end
    if size == 2 then return a * 256 + b end
    return size == 1 and a or (a * 256 + b) * 256 + c
end

-- Which second bytes may follow a first byte (RFC 3629), and how many bytes follow in all.
local function utf8_rule(first)
    if first < 0x80 then return 0 end
    if first >= 0xC2 and first <= 0xDF then return 1, 0x80, 0xBF end
    if first >= 0xE0 and first <= 0xEF then return 2, first == 0xE0 and 0xA0 or 0x80, first == 0xED and 0x9F or 0xBF end
    if first >= 0xF0 and first <= 0xF4 then return 3, first == 0xF0 and 0x90 or 0x80, first == 0xF4 and 0x8F or 0xBF end
end

local function is_utf8(text)
    local at = 1
    while at <= #text do
        local more, low, high = utf8_rule(byte(text, at))
        if not more or at + more > #text then return false end
        for i = at + 1, at + more do
            local continuation = byte(text, i)
            if continuation < (low or 0x80) or continuation > (high or 0xBF) then return false end
            low, high = nil, nil
        end
        at = at + more + 1
    end
    return true
end

-- Takes the chunk's next field, if the chunk is long enough.
local function take(chunk, raw, name, size)
    local at, items = chunk.pos, chunk.items
    if at + size > chunk.stop then return false end
    local n = #items
    items[n + 1], items[n + 2], items[n + 3] = F[name], at, size
    if size <= 4 then chunk[name] = uint(raw, at, size) end
    chunk.pos = at + size
    return true
end

-- What follows a kind's fixed fields, and what of their values is not allowed, wire.md §4. Each returns whether all is well.
local CHECKS = {}

function CHECKS.HELLO(chunk, raw)
    local len = chunk["hello.name_len"]
    if len > NAME_MAX or chunk.pos + len > chunk.stop then return false end
    chunk.name = raw:sub(chunk.pos + 1, chunk.pos + len)
    if not is_utf8(chunk.name) then return false end
    chunk.name_at, chunk.pos = chunk.pos, chunk.pos + len
    local padding = math.min(-len % 4, chunk.stop - chunk.pos)
    if padding > 0 then take(chunk, raw, "padding", padding) end
    chunk.features_at = chunk.pos
    if not take(chunk, raw, "hello.features", 4) then chunk.features_at = nil end
    return true
end
CHECKS["HELLO-ACK"] = CHECKS.HELLO

-- The message behind another one.
local function follow(chunk, before)
    chunk.sender_port, chunk.receiver_port, chunk.stream_epoch = before.sender_port, before.receiver_port, before.stream_epoch
    chunk.number, chunk.high = ((before.last or before.number) + 1) % 2 ^ 32, before.high
end

-- An EAGER behind the one in front of it, with which it has the rest in common.
function CHECKS.NEXT(chunk, raw)
    local before = chunk.before
    if not before then return false end
    chunk.tag_at = before.tag_at
    if band(chunk.flags, TAG) ~= 0 then
        chunk.tag_at = chunk.pos
        if not take(chunk, raw, "tag", 8) then return false end
    end
    follow(chunk, before)
    return true
end

-- Several of them, of one length.
function CHECKS.RUN(chunk)
    local before, count, len = chunk.before, chunk["run.count"], chunk["payload.length"]
    if not before or count == 0 or len == 0 or len % count ~= 0 then return false end
    chunk.tag_at = before.tag_at
    follow(chunk, before)
    chunk.last = (chunk.number + count - 1) % 2 ^ 32
    return true
end

function CHECKS.EAGER(chunk)
    chunk.tag_at = chunk.pos - 8
    return true
end

function CHECKS.RTS(chunk) return chunk["payload.length"] <= chunk.total end

function CHECKS.DATA(chunk)
    local len = chunk["payload.length"]
    return len > 0 and chunk.offset + len < 2 ^ 32
end

function CHECKS.CTS(chunk, raw)
    if chunk["missing.count"] > RANGES_MAX then return false end
    for _ = 1, chunk["missing.count"] do
        if not (take(chunk, raw, "missing.from", 4) and take(chunk, raw, "missing.to", 4)) then return false end
        if chunk["missing.from"] >= chunk["missing.to"] then return false end
    end
    return true
end

function CHECKS.ACK(chunk, raw)
    chunk.words = math.min(floor((chunk.stop - chunk.pos) / 8), WORDS_MAX)
    chunk.bitmap_at = chunk.pos
    return chunk.words == 0 or take(chunk, raw, "received", 8 * chunk.words)
end

CHECKS["NULL-ACK"] = function(chunk) return chunk.delivered <= 1 end

-- The fields of a chunk whose bytes are all there; whether they are what wire.md allows.
local function read_fields(chunk, raw)
    local has_payload = chunk.flags % 2 == PAYLOAD
    if has_payload then
        local second = chunk.kind and chunk.kind.name == "RUN" and "run.count" or "reserved"
        if not (take(chunk, raw, "payload.length", 2) and take(chunk, raw, second, 2) and take(chunk, raw, "payload.crc", 4)) then
            return false
        end
    end
    local kind = chunk.kind
    if not kind then return true end
    local layout = kind.layout
    for i = 1, #layout, 2 do
        if not take(chunk, raw, layout[i], layout[i + 1]) then return false end
    end
    if (chunk.sender_port or 0) >= PORTS or (chunk.receiver_port or 0) >= PORTS then return false end
    if (kind.payload or false) ~= has_payload then return false end
    local check = CHECKS[kind.name]
    if check and not check(chunk, raw) then return false end
    return not kind.start or band(chunk.flags, START) == 0 or take(chunk, raw, "start", 4)
end

-- The chunk at `at` in a header area that ends at `area`: the chunk as far as it can be read, and what is wrong with it. `before` is the
-- message directly in front of it, if there is one.
local function read_chunk(raw, at, area, before)
    if at + 4 > area then return nil, "chunk_length" end
    if at + 4 > #raw then return nil, CUT end
    local number, flags = byte(raw, at + 1, at + 2)
    local length = uint(raw, at + 2, 2)
    local name = KIND_NAMES[number]
    local chunk = { at = at, length = length, kind = name and KINDS[name], kind_number = number, flags = flags, items = {} }
    chunk.high, chunk.before = band(flags, HIGH) ~= 0, before
    if length < 4 or length % 4 ~= 0 or at + length > area then return chunk, "chunk_length" end
    chunk.pos, chunk.stop = at + 4, at + length
    if chunk.stop > #raw then return chunk, CUT end
    if not read_fields(chunk, raw) then return chunk, "chunk_field" end
    local rest = chunk.stop - chunk.pos
    if rest > 0 then take(chunk, raw, chunk.kind and "chunk.more" or "chunk.unknown", rest) end
    return chunk
end

-- All chunks, as far as they can be read, and what is wrong with the first that cannot.
local function read_chunks(frame, raw)
    local at, before, in_runs = HEADER_LEN, nil, 0
    for i = 1, frame.chunk_count do
        local chunk, wrong = read_chunk(raw, at, frame.header_len, before)
        frame.chunks[i] = chunk
        if wrong then
            if chunk then chunk.wrong = wrong end
            return wrong
        end
        before = chunk.tag_at and chunk
        in_runs = in_runs + (chunk["run.count"] or 0)
        at = at + chunk.length
    end
    if at ~= frame.header_len then return "chunk_count" end
    if in_runs > RUNS_MAX then return "chunk_field" end
end

-- What a bare frame says instead of these three.
local function association(src_incarnation, dst_incarnation, engine_epoch)
    return bxor(engine_epoch, bit32.lrotate(src_incarnation, 8), bit32.lrotate(dst_incarnation, 16))
end

-- Where each chunk's payload lies, and whether payloads, padding and frame fit each other.
local function place_payloads(frame)
    local used, probe = frame.header_len, 0
    for _, chunk in ipairs(frame.chunks) do
        if chunk["payload.length"] then
            chunk.payload_at = used
            used = used + chunk["payload.length"]
        end
        if chunk.kind == KINDS["PATH-PROBE"] then probe = math.max(probe, chunk.size) end
    end
    frame.used = used
    if frame.total < math.max(used, probe) then return "payload_length" end
    if frame.total > math.max(used, probe, PADDED_MAX) then return "trailing" end
end

-- A bare frame: its one chunk is DATA, whose fields are the header's. What is wrong with it.
local function read_bare(frame, raw)
    if frame.total < BARE_LEN then return "truncated" end
    if #raw < BARE_LEN then return CUT end
    if byte(raw, 3) ~= VERSION then return "version" end
    frame.bare, frame.association = true, uint(raw, 4, 4)
    frame.src_node, frame.dst_node = uint(raw, 8, 2), uint(raw, 10, 2)
    frame.src_queue, frame.dst_queue = byte(raw, 13, 14)
    frame.sent_at, frame.echo, frame.crc = uint(raw, 16, 4), 0, uint(raw, BARE_CRC_AT, 4)
    frame.computed = crc32c(raw, 0, BARE_CRC_AT)
    frame.verdict = frame.computed == frame.crc and GOOD or BAD
    local flags, len = byte(raw, 4), frame.total - BARE_LEN
    local chunk = { at = 20, length = 16, kind = KINDS.DATA, flags = flags, high = band(flags, HIGH) ~= 0, items = {}, pos = 14, stop = BARE_CRC_AT }
    for _, name in ipairs { "sender_port", "receiver_port" } do take(chunk, raw, name, 1) end
    chunk.pos = 20
    for _, name in ipairs { "stream_epoch", "number", "offset", "payload.crc" } do take(chunk, raw, name, 4) end
    chunk["payload.length"], frame.chunks[1] = len, chunk
    if frame.verdict == BAD then return "header_crc" end
    if frame.total <= PADDED_MAX then return "truncated" end
    if chunk.offset + len >= 2 ^ 32 then return "chunk_field" end
    chunk.payload_at, frame.used = BARE_LEN, frame.total
end

-- The frame in `raw`, the captured part of `total` bytes.
local function read_frame(raw, total)
    local frame = { total = total, chunks = {} }
    local function stop(wrong)
        if wrong == CUT then frame.cut = true else frame.malformed = frame.malformed or wrong end
        return frame
    end
    if #raw < total then frame.cut = true end
    if total > FRAME_MAX then return stop("too_long") end
    if #raw >= 2 and uint(raw, 0, 2) == BARE_MAGIC then return stop(read_bare(frame, raw)) end
    if total < HEADER_LEN then return stop("truncated") end
    if #raw < HEADER_LEN then return stop(CUT) end
    if uint(raw, 0, 2) ~= MAGIC then return stop("magic") end
    if byte(raw, 3) ~= VERSION then return stop("version") end
    frame.chunk_count, frame.header_len = byte(raw, 4), uint(raw, 4, 2)
    frame.src_node, frame.dst_node = uint(raw, 8, 2), uint(raw, 10, 2)
    frame.src_queue, frame.dst_queue = byte(raw, 13, 14)
    frame.held, frame.src_incarnation, frame.dst_incarnation = uint(raw, 14, 2), uint(raw, 16, 4), uint(raw, 20, 4)
    frame.association = association(frame.src_incarnation, frame.dst_incarnation, uint(raw, 24, 4))
    frame.sent_at, frame.echo, frame.crc = uint(raw, 36, 4), uint(raw, 40, 4), uint(raw, CRC_AT, 4)
    frame.verdict = UNVERIFIED
    if frame.header_len < HEADER_LEN or frame.header_len > total then return stop("header_length") end
    if frame.header_len <= #raw then
        frame.computed = header_crc(raw, frame.header_len)
        frame.verdict = frame.computed == frame.crc and GOOD or BAD
        -- The rest is read all the same: whoever looks at a damaged frame wants to see what it was.
        if frame.verdict == BAD then stop("header_crc") end
    end
    local wrong = read_chunks(frame, raw)
    if wrong then return stop(wrong) end
    return stop(place_payloads(frame))
end

-- The i of `base + i` that an ACK's bitmap lists.
local function received_bits(chunk, raw)
    local bits = {}
    for w = 0, chunk.words - 1 do
        for octet = 0, 7 do
            local value = byte(raw, chunk.bitmap_at + 8 * w + 8 - octet)
            for bit = 0, value > 0 and 7 or -1 do
                if floor(value / 2 ^ bit) % 2 == 1 then bits[#bits + 1] = 64 * w + 8 * octet + bit end
            end
        end
    end
    return bits
end

-- ---- link ----

local OPEN_MAX = 64 -- unanswered copies of one request that are remembered
local ANSWERS_MAX = 8 -- frames that one answer is said to answer
local UNSETTLED_MAX = 1024 -- numbers of a stream that one answer can settle, transport.md §14
local BUCKET = 4096 -- bytes of a long message per list of ranges
local BUCKET_MAX = 64 -- ranges remembered per list

-- What is known of the capture so far:
--   records   by packet number: {frame, time, sent_at, echo, links}
--   stamps    by pair of engines: sent_at → packet number
--   asked     requests that concern no stream, unanswered, by a name for each
--   streams   by names of their ends and epoch: {index, label, low, newest, messages, asked}
--   exact     by node: whether it acknowledges each message on its own
--   sources   by pair of engines and association: the sender's incarnation, which a bare frame does not say
local known

local function forget()
    known = { records = {}, stamps = {}, asked = {}, streams = {}, stream_count = 0, exact = {}, sources = {} }
end
portolan.init = forget
forget()

local function serial_lt(a, b) return a ~= b and (b - a) % 2 ^ 32 < 2 ^ 31 end
local function plus(a, n) return (a + n) % 2 ^ 32 end

-- An answer says at most so much of what it answers: the newest.
local function add_answered(link, record)
    local answers = link.answers or {}
    link.answers = answers
    if answers[#answers] == record then return end
    if #answers == ANSWERS_MAX then table.remove(answers, 1) end
    answers[#answers + 1] = record
end

-- A request waits for its answer.
local function ask(asked, name, link)
    local open = asked[name]
    if not open then
        asked[name] = { link }
        return
    end
    link.asked_before = open[#open].record
    if #open == OPEN_MAX then table.remove(open, 1) end
    open[#open + 1] = link
end

-- An answer came: to those requests that its writer had heard, as its echo says. If it has no echo yet, then to all of them.
local function answer(asked, name, link)
    local open = asked[name]
    if not open then return end
    local echo, heard, left = link.record.echo, {}, {}
    for _, request in ipairs(open) do
        local was_heard = echo == 0 or not serial_lt(echo, request.record.sent_at)
        table.insert(was_heard and heard or left, request)
    end
    if #heard == 0 then return end
    for _, request in ipairs(heard) do request.answered_in = link.record end
    asked[name] = #left > 0 and left or nil
    add_answered(link, heard[#heard].record)
end

local function stream_of(frame, chunk)
    local s, r = frame.src_node, frame.dst_node
    local incarnation = frame.src_incarnation
    if not chunk.kind.forward then s, r, incarnation = r, s, frame.dst_incarnation end
    local label = format("%d:%d → %d:%d%s epoch %d", s, chunk.sender_port, r, chunk.receiver_port, chunk.high and " high" or "",
        chunk.stream_epoch)
    local name = label .. format(" %08x", incarnation)
    local found = known.streams[name]
    if not found then
        found = { index = known.stream_count, label = label, messages = {}, asked = {}, exact_node = r }
        known.streams[name], known.stream_count = found, known.stream_count + 1
    end
    return found
end

local function message_of(stream, number)
    local message = stream.messages[number]
    if not message then
        message = {}
        stream.messages[number] = message
        if not stream.low or serial_lt(number, stream.low) then stream.low = number end
        if not stream.newest or serial_lt(stream.newest, number) then stream.newest = number end
    end
    return message
end

-- Bytes [from, to) of a message travel: the frame in which one of them did before.
local function cover(message, from, to, record)
    local before
    if from == to then return end
    message.ranges = message.ranges or {}
    for bucket = floor(from / BUCKET), floor((to - 1) / BUCKET) do
        local list = message.ranges[bucket]
        if not list or #list >= 3 * BUCKET_MAX then
            list = {}
            message.ranges[bucket] = list
        end
        local n = #list
        for i = 1, n, 3 do
            local overlaps = list[i] < to and from < list[i + 1]
            if overlaps and (not before or before.frame < list[i + 2].frame) then before = list[i + 2] end
        end
        list[n + 1], list[n + 2], list[n + 3] = from, to, record
    end
    return before
end

-- A message is committed, as this answer says.
local function commit(stream, number, link)
    local message = stream.messages[number]
    if not message or message.committed or not message.first then return end
    message.committed = true
    message.first.committed_in = link.record
    link.commits = (link.commits or 0) + 1
    link.first_sent = message.first.record
end

-- A message is not and never will be: that its number is passed over later is no commit.
local function give_up(stream, number)
    local message = stream.messages[number]
    if message then message.committed = true end
end

-- For each number from `from` up to, not including, `to` that one answer can speak of.
local function each_number(from, to, act)
    if not serial_lt(from, to) then return end
    local count = math.min((to - from) % 2 ^ 32, UNSETTLED_MAX)
    for back = count, 1, -1 do act(plus(to, -back)) end
end

-- Every number before `base` is committed.
local function settle(stream, base, link)
    if not stream.low then return end
    local open
    each_number(stream.low, base, function(number)
        answer(stream.asked, number, link)
        commit(stream, number, link)
        -- A copy that came too late for this answer waits for the next one.
        if stream.asked[number] then open = open or number end
    end)
    if serial_lt(stream.low, base) then stream.low = open or base end
end

-- Everything from `from` on that waits for an answer has this one.
local function answer_all(stream, from, link)
    if not from or not stream.newest then return end
    each_number(from, plus(stream.newest, 1), function(number) answer(stream.asked, number, link) end)
end

-- What each kind means for the stream it names. Requests wait in `stream.asked`: first chunks under their number, others under a name.
local ON = {}

local function first_bytes(stream, number, len, link)
    local message = message_of(stream, number)
    if serial_lt(number, stream.low) then stream.low = number end
    link.sent_before = message.last
    message.first, message.last = message.first or link, link.record
    cover(message, 0, len, link.record)
    ask(stream.asked, number, link)
    link.asked_before = nil -- that it was sent before says it already
end

local function first_chunk(stream, chunk, link) first_bytes(stream, chunk.number, chunk["payload.length"], link) end
ON.EAGER, ON.NEXT, ON.RTS = first_chunk, first_chunk, first_chunk

-- Messages of a RUN that are told of, more than a writer puts into one.
local function run_len(chunk) return math.min(chunk["run.count"], 255) end

-- Each of its messages has a link of its own.
function ON.RUN(stream, chunk, link)
    link.parts = {}
    local len = floor(chunk["payload.length"] / chunk["run.count"])
    for k = 1, run_len(chunk) do
        link.parts[k] = { record = link.record }
        first_bytes(stream, plus(chunk.number, k - 1), len, link.parts[k])
    end
end

function ON.DATA(stream, chunk, link)
    local message = message_of(stream, chunk.number)
    link.sent_before = cover(message, chunk.offset, chunk.offset + chunk["payload.length"], link.record)
    message.last_data = link
end

function ON.CTS(stream, chunk, link) answer(stream.asked, chunk.number, link) end
ON.READY = ON.CTS

function ON.MSGEND(stream, chunk, link)
    answer(stream.asked, chunk.number, link)
    local message = stream.messages[chunk.number]
    if message and message.last_data and not message.last_data.answered_in then
        message.last_data.answered_in = link.record
        add_answered(link, message.last_data.record)
    end
    commit(stream, chunk.number, link)
end

function ON.ACK(stream, chunk, link, raw)
    if known.exact[stream.exact_node] then
        answer(stream.asked, plus(chunk.base, -1), link)
        commit(stream, plus(chunk.base, -1), link)
        return
    end
    settle(stream, chunk.base, link)
    if next(stream.asked) then
        for _, i in ipairs(received_bits(chunk, raw)) do answer(stream.asked, plus(chunk.base, i), link) end
    end
end

function ON.RESUME(stream, chunk, link) settle(stream, chunk.base, link) end

function ON.NACK(stream, chunk, link) answer(stream.asked, chunk.expected, link) end

function ON.PROBE(stream, _, link) ask(stream.asked, "PROBE", link) end

function ON.NULL(stream, chunk, link) ask(stream.asked, "NULL " .. chunk.number, link) end

ON["NULL-ACK"] = function(stream, chunk, link)
    answer(stream.asked, "NULL " .. chunk.number, link)
    if chunk.delivered == 1 then
        commit(stream, chunk.number, link)
    else
        give_up(stream, chunk.number)
        ask(stream.asked, "drop " .. chunk.number, link)
    end
end

function ON.MSGDROP(stream, chunk, link)
    answer(stream.asked, chunk.number, link)
    answer(stream.asked, "NULL " .. chunk.number, link)
    give_up(stream, chunk.number)
    ask(stream.asked, "drop " .. chunk.number, link)
end

ON["DROP-CONFIRM"] = function(stream, chunk, link) answer(stream.asked, "drop " .. chunk.number, link) end

ON["PORT-CLOSED"] = function(stream, chunk, link)
    settle(stream, chunk.base, link)
    answer_all(stream, chunk.base, link)
end

function ON.REFUSED(stream, _, link) answer_all(stream, stream.low, link) end

function ON.CLOSE(stream, _, link) ask(stream.asked, "CLOSE", link) end

function ON.CLOSED(stream, _, link) answer(stream.asked, "CLOSE", link) end

-- The same for kinds that concern no stream; `there` and `back` name this frame's way between two engines and the opposite one. A
-- HELLO waits under the low half of its incarnation: that is what RESET repeats of it.
local ON_PEER = {}

function ON_PEER.HELLO(frame, chunk, link, there, _, raw)
    known.exact[frame.src_node] = chunk["hello.ack_rule"] == EXACT
    ask(known.asked, "HELLO " .. there .. raw:sub(chunk.at + 9, chunk.at + 12), link)
end

ON_PEER["HELLO-ACK"] = function(frame, chunk, link, _, back, raw)
    known.exact[frame.src_node] = chunk["hello.ack_rule"] == EXACT
    answer(known.asked, "HELLO " .. back .. raw:sub(chunk.at + 17, chunk.at + 20), link)
end

function ON_PEER.RESET(_, chunk, link, _, back, raw)
    answer(known.asked, "HELLO " .. back .. raw:sub(chunk.at + 5, chunk.at + 8), link)
end

ON_PEER["PATH-PROBE"] = function(_, chunk, link, there)
    ask(known.asked, format("PATH %s %d %d", there, chunk.size, chunk.nonce), link)
end

ON_PEER["PATH-ACK"] = function(_, chunk, link, _, back)
    answer(known.asked, format("PATH %s %d %d", back, chunk.size, chunk.nonce), link)
end

-- Notes the frame's time stamp, and finds the frame it echoes and the frame it repeats.
local function note_stamps(frame, record, there, back)
    local stamps = known.stamps[there]
    if not stamps then
        stamps = {}
        known.stamps[there] = stamps
    end
    local twin = known.records[stamps[frame.sent_at] or 0]
    if twin and twin.crc == frame.crc then record.duplicate_of = twin else stamps[frame.sent_at] = record.frame end
    if frame.echo ~= 0 and known.stamps[back] then record.echoed = known.records[known.stamps[back][frame.echo] or 0] end
end

-- The record of a frame that is seen for the first time.
local function link_frame(frame, raw, number, time)
    local record = { frame = number, time = time, sent_at = frame.sent_at, echo = frame.echo, crc = frame.crc, links = {} }
    known.records[number] = record
    if frame.malformed or frame.verdict ~= GOOD then return record end
    local there = format("%d.%d>%d.%d ", frame.src_node, frame.src_queue, frame.dst_node, frame.dst_queue)
    local back = format("%d.%d>%d.%d ", frame.dst_node, frame.dst_queue, frame.src_node, frame.src_queue)
    note_stamps(frame, record, there, back)
    local both = there .. frame.association
    if not frame.bare then known.sources[both] = frame.src_incarnation end
    frame.src_incarnation = frame.src_incarnation or known.sources[both] or 0
    for i, chunk in ipairs(frame.chunks) do
        if chunk.kind and not chunk.wrong then
            local link, name = { record = record }, chunk.kind.name
            record.links[i] = link
            if chunk.sender_port then
                local stream = stream_of(frame, chunk)
                link.stream = stream
                -- The same frame again asks and answers nothing new.
                if not record.duplicate_of then
                    ON[name](stream, chunk, link, raw)
                    if not chunk.kind.forward then answer(stream.asked, "PROBE", link) end
                end
            elseif not record.duplicate_of then
                ON_PEER[name](frame, chunk, link, there, back, raw)
            end
        end
    end
    return record
end

-- ---- show ----

portolan.prefs.udp_ports = Pref.range("UDP ports", "28000-28063",
    "Ports whose datagrams are Portolan's: cluster.udp_port of the configuration, and one more for each queue", 65535)
portolan.prefs.check_payloads = Pref.bool("Check payloads", true, "Compute the CRC32C of every payload")

local function name_of(names, value) return names[value] or tostring(value) end

-- Text from the network, for one line.
local function printable(text) return (text:gsub("%c", "?")) end

-- What a chunk says, in a few words; `link` may be nil.
local SAYS = {}

local function hello_says(c)
    return format("%s, %s", printable(c.name), name_of(RECOVERIES, c["hello.recovery"]))
end
SAYS.HELLO, SAYS["HELLO-ACK"] = hello_says, hello_says

function SAYS.RESET(c)
    local reason = name_of(RESET_REASONS, c["reset.reason"])
    return c["reset.detail"] == 0 and reason or reason .. " " .. name_of(RESET_DETAILS, c["reset.detail"])
end
function SAYS.EAGER(c) return format("#%d %d B", c.number, c["payload.length"]) end
SAYS.NEXT = SAYS.EAGER
function SAYS.RUN(c)
    local count = c["run.count"]
    return format("#%d to #%d %d × %d B", c.number, c.last, count, floor(c["payload.length"] / count))
end
function SAYS.RTS(c) return format("#%d %d B, the first %d", c.number, c.total, c["payload.length"]) end
function SAYS.DATA(c) return format("#%d %d to %d", c.number, c.offset, c.offset + c["payload.length"]) end
function SAYS.CTS(c)
    local missing = c["missing.count"]
    return format("#%d granted %d%s", c.number, c.granted, missing > 0 and format(", %d missing", missing) or "")
end
local function number_says(c) return format("#%d", c.number) end
for _, name in ipairs { "MSGEND", "READY", "PROBE", "DROP-CONFIRM", "NULL" } do SAYS[name] = number_says end
function SAYS.ACK(c, raw)
    local beyond = #received_bits(c, raw)
    return format("base %d%s", c.base, beyond > 0 and format(" +%d", beyond) or "")
end
function SAYS.NACK(c) return format("#%d %s", c.expected, name_of(NACK_REASONS, c["nack.reason"])) end
function SAYS.MSGDROP(c) return format("#%d %s", c.number, name_of(DROP_REASONS, c["drop.reason"])) end
SAYS["NULL-ACK"] = function(c) return format("#%d %s", c.number, c.delivered == 1 and "delivered" or "not delivered") end
SAYS["PORT-CLOSED"] = function(c) return format("base %d", c.base) end
SAYS.RESUME = SAYS["PORT-CLOSED"]
function SAYS.CLOSE(c) return format("next %d", c.next) end
local function nothing() return "" end
SAYS.CLOSED, SAYS.REFUSED = nothing, nothing
local function path_says(c) return format("%d B", c.size) end
SAYS["PATH-PROBE"], SAYS["PATH-ACK"] = path_says, path_says

-- Whether any of it was sent, or asked, before.
local function is_again(link)
    for _, part in ipairs(link.parts or {}) do
        if part.sent_before then return true end
    end
    return link.sent_before or link.asked_before
end

local function chunk_text(frame, chunk, link, raw)
    if not chunk.kind then return format("kind %d", chunk.kind_number) end
    local name = chunk.kind.name
    if chunk.wrong then return name .. " (" .. chunk.wrong .. ")" end
    local way = ""
    if chunk.sender_port then
        local s, r = frame.src_node, frame.dst_node
        if not chunk.kind.forward then s, r = r, s end
        way = format(" %d:%d→%d:%d", s, chunk.sender_port, r, chunk.receiver_port)
    end
    local says = SAYS[name](chunk, raw)
    local again = link and is_again(link) and " [again]" or ""
    return name .. way .. (says == "" and "" or " " .. says) .. again
end

-- What is being shown: the frame's bytes; whether anybody looks at any field of ours (not so in the first of two passes, or in a list
-- of packets without a filter on our fields), and whether at all of them. Items nobody looks at are not made, which is most of the
-- time that a frame takes; what would hang on such an item hangs on the one above.
local shown = { tvb = nil, fields = true, all = true }

local function is_looked_at(tree, what)
    return shown.all or shown.fields and tree:referenced(what)
end

-- An item for `len` bytes at `at`, which the caller knows to be there.
local function put(tree, what, at, len, ...)
    return is_looked_at(tree, what) and tree:add(what, shown.tvb(at, len), ...) or tree
end

-- An item that no byte of the frame stands for.
local function put_found(tree, name, value)
    local what = F[name]
    return is_looked_at(tree, what) and tree:add(what, value):set_generated() or tree
end

local function put_hidden(tree, name, value)
    local what = F[name]
    if is_looked_at(tree, what) then tree:add(what, value):set_hidden() end
end

local function put_time(tree, name, from, to)
    local seconds = to.time - from.time
    local whole = floor(seconds)
    put_found(tree, name, NSTime(whole, floor((seconds - whole) * 1e9 + 0.5)))
end

local function show_links(tree, link, record)
    if link.stream then
        put_found(tree, "stream", link.stream.label)
        put_found(tree, "stream.index", link.stream.index)
    end
    if link.sent_before then
        put_found(tree, "retransmission", true):add_proto_expert_info(E.again)
        put_found(tree, "sent_before_in", link.sent_before.frame)
    end
    if link.asked_before then
        put_found(tree, "repeated", true):add_proto_expert_info(E.asked)
        put_found(tree, "asked_before_in", link.asked_before.frame)
    end
    for _, asked in ipairs(link.answers or {}) do
        put_found(tree, "answers", asked.frame)
        put_time(tree, "answer_time", asked, record)
    end
    if link.answered_in then put_found(tree, "answered_in", link.answered_in.frame) end
    if link.commits then
        put_found(tree, "commits", link.commits)
        put_found(tree, "first_sent_in", link.first_sent.frame)
        put_time(tree, "commit_time", link.first_sent, record)
    end
    if link.committed_in then put_found(tree, "committed_in", link.committed_in.frame) end
end

-- How much of [at, at + len) was captured.
local function captured(at, len) return math.max(math.min(len, shown.tvb:len() - at), 0) end

-- The computed checksum of a payload that does not match its own, nil of one that does. A frame's record remembers it.
local function wrong_payload(record, i, chunk, raw)
    if record and record.checked then return record.checked[i] end
    local computed = crc32c(raw, chunk.payload_at, chunk["payload.length"])
    return computed ~= chunk["payload.crc"] and computed or nil
end

local function show_payload(tree, frame, chunk, i, raw)
    local at, len = chunk.payload_at, chunk["payload.length"]
    local there = captured(at, len)
    if there > 0 then put(tree, F.payload, at, there) end
    local verdict, computed = UNVERIFIED, nil
    if at + len <= #raw and portolan.prefs.check_payloads then
        computed = wrong_payload(frame.record, i, chunk, raw)
        verdict = computed and BAD or GOOD
    end
    local item = put_found(tree, "payload.crc.status", verdict)
    if verdict == BAD then
        frame.bad_payloads[i] = computed
        if shown.all then item:append_text(format(": it should be 0x%08x", computed)) end
        item:add_proto_expert_info(E.payload_crc)
    end
end

local HEADER_FLAGS = { "flags.crowded", "flags.return_credit", "flags.reserved" }
local CHUNK_FLAGS = { "chunk.payload", "chunk.start", "chunk.high", "chunk.ack_now", "chunk.ack_lazy", "chunk.unasked", "chunk.tag", "chunk.reserved" }

local function put_flags(tree, name, at, len, bits)
    local item, range = put(tree, F[name], at, len), shown.tvb(at, len)
    for _, bit in ipairs(bits) do
        if is_looked_at(tree, F[bit]) then item:add(F[bit], range) end
    end
end

local function numbers_text(base, bits)
    local parts, i = {}, 1
    while i <= #bits do
        local j = i
        while bits[j + 1] == bits[j] + 1 do j = j + 1 end
        local from, to = plus(base, bits[i]), plus(base, bits[j])
        parts[#parts + 1] = i == j and tostring(from) or format("%d-%d", from, to)
        i = j + 1
    end
    return table.concat(parts, ", ")
end

-- What NEXT and RUN have in common with the message in front of them, where it is.
local function show_common(tree, chunk)
    for _, name in ipairs { "sender_port", "receiver_port", "stream_epoch" } do put_found(tree, name, chunk[name]) end
    local is_run = chunk.kind == KINDS.RUN
    if not is_run then put_found(tree, "number", chunk.number) end
    if (is_run or band(chunk.flags, TAG) == 0) and is_looked_at(tree, F.tag) then
        tree:add(F.tag, shown.tvb(chunk.tag_at, 8)):set_generated()
    end
end

-- The beginning of a chunk's header, which a bare frame's DATA does not have.
local function show_prefix(tree, chunk)
    if not chunk.kind_number then
        put_found(tree, "chunk.kind", DATA)
        put_found(tree, "payload.length", chunk["payload.length"])
        return
    end
    put(tree, F["chunk.kind"], chunk.at, 1)
    put_flags(tree, "chunk.flags", chunk.at + 1, 1, CHUNK_FLAGS)
    put(tree, F["chunk.length"], chunk.at + 2, 2)
end

local function show_fields(tree, chunk, raw)
    show_prefix(tree, chunk)
    local items = chunk.items
    for n = 1, #items, 3 do put(tree, items[n], items[n + 1], items[n + 2]) end
    if chunk.name and #chunk.name > 0 then put(tree, F["hello.name"], chunk.name_at, #chunk.name, chunk.name) end
    for _, name in ipairs { "hello.features.next", "hello.features.run", "hello.features.bare" } do
        if chunk.features_at and is_looked_at(tree, F[name]) then tree:add(F[name], shown.tvb(chunk.features_at, 4)) end
    end
    if (chunk.kind == KINDS.NEXT or chunk.kind == KINDS.RUN) and not chunk.wrong then show_common(tree, chunk) end
    if chunk.receiver_port and not chunk.wrong then
        put_hidden(tree, "port", chunk.sender_port)
        put_hidden(tree, "port", chunk.receiver_port)
    end
    if chunk.expected then put_hidden(tree, "number", chunk.expected) end
    if chunk.words and chunk.words > 0 then
        put_found(tree, "received.numbers", numbers_text(chunk.base, received_bits(chunk, raw)))
    end
end

-- Each message of a RUN, and what was found of it.
local function show_run(tree, chunk, link, record)
    for k = 1, run_len(chunk) do
        local item = put_found(tree, "number", plus(chunk.number, k - 1))
        if link and link.parts then show_links(item, link.parts[k], record) end
    end
end

-- Shows a chunk of which at least four bytes are there; returns what it says in a few words.
local function show_chunk(parent, frame, chunk, i, raw)
    local record = frame.record
    local link = record and record.links[i]
    local text = chunk_text(frame, chunk, link, raw)
    local tree = put(parent, F.chunk, chunk.at, captured(chunk.at, math.max(chunk.length, 4)))
    if shown.all then tree:set_text("Chunk: " .. text) end
    if link then show_links(tree, link, record) end
    if shown.fields then show_fields(tree, chunk, raw) end
    if chunk.kind == KINDS.RUN and not chunk.wrong then show_run(tree, chunk, link, record) end
    if chunk.payload_at then show_payload(tree, frame, chunk, i, raw) end
    if not chunk.kind then tree:add_proto_expert_info(E.unknown, format("Kind %d is not one of version 1: skipped", chunk.kind_number)) end
    if chunk.kind and chunk.kind.refuses and not chunk.wrong then tree:add_proto_expert_info(E.refusal, text) end
    return text
end

local SHORT_FIELDS = { "src_node", 2, "dst_node", 2, "src_queue", 1, "dst_queue", 1 }
local LONG_FIELDS = {
    "src_incarnation", "dst_incarnation", "engine_epoch", "sent_buffers", "credit_limit", "sent_at", "echo", "header_crc",
}

local function show_header_fields(tree, frame)
    put(tree, F.magic, 0, 2)
    put(tree, F.version, 2, 1)
    if frame.bare then
        put(tree, F["bare.flags"], 3, 1)
        put(tree, F.association, 4, 4)
    else
        put(tree, F.chunk_count, 3, 1)
        put(tree, F.header_len, 4, 2)
        put_flags(tree, "flags", 6, 2, HEADER_FLAGS)
    end
    local at = 8
    for i = 1, #SHORT_FIELDS, 2 do
        put(tree, F[SHORT_FIELDS[i]], at, SHORT_FIELDS[i + 1])
        at = at + SHORT_FIELDS[i + 1]
    end
    put_hidden(tree, "node", frame.src_node)
    put_hidden(tree, "node", frame.dst_node)
    if frame.bare then
        put(tree, F.sent_at, 16, 4)
        put(tree, F.header_crc, BARE_CRC_AT, 4)
    else
        local held = put(tree, F.held, 14, 2)
        if shown.all then held:append_text(format(" = %s%.3f µs", frame.held == 65535 and "at least " or "", frame.held * 0.256)) end
        for i, name in ipairs(LONG_FIELDS) do put(tree, F[name], 12 + 4 * i, 4) end
    end
    local status = put_found(tree, "header_crc.status", frame.verdict)
    if frame.verdict == BAD and shown.all then status:append_text(format(": it should be 0x%08x", frame.computed)) end
end

local function show_header(tree, frame)
    if shown.fields then show_header_fields(tree, frame) end
    local record = frame.record
    if record and record.echoed then
        put_found(tree, "echoed", record.echoed.frame)
        put_time(tree, "echo_time", record.echoed, record)
    end
    if record and record.duplicate_of then
        local twin = record.duplicate_of.frame
        put_found(tree, "duplicate", true):add_proto_expert_info(E.duplicate, "The network or the capture doubled frame " .. twin)
        put_found(tree, "duplicate_of", twin)
    end
end

local function show_chunks(tree, frame, raw)
    local texts = {}
    frame.bad_payloads = {}
    for i, chunk in ipairs(frame.chunks) do texts[i] = show_chunk(tree, frame, chunk, i, raw) end
    if frame.record and portolan.prefs.check_payloads then frame.record.checked = frame.bad_payloads end
    return texts
end

-- Padding and what is too much, behind the last payload.
local function show_rest(tree, frame)
    local there = frame.used and captured(frame.used, frame.total - frame.used) or 0
    if there > 0 then put(tree, F.padding, frame.used, there) end
end

-- The line for the Info column.
local function summary(frame, texts)
    local marks = ""
    if frame.malformed then marks = "[Malformed: " .. frame.malformed .. "] " end
    if frame.cut then marks = marks .. "[cut off by the capture] " end
    if frame.bad_payloads and next(frame.bad_payloads) then marks = marks .. "[corrupt payload] " end
    if frame.record and frame.record.duplicate_of then marks = marks .. "[doubled] " end
    if not frame.src_node then return marks end
    local s, r = tostring(frame.src_node), tostring(frame.dst_node)
    if frame.src_queue + frame.dst_queue > 0 then s, r = s .. "." .. frame.src_queue, r .. "." .. frame.dst_queue end
    local what = #texts > 0 and table.concat(texts, " | ") or "no chunks, only credit"
    return format("%s%s→%s  %s", marks, s, r, what)
end

local function show_frame(tree, frame, raw)
    if frame.malformed then
        put_found(tree, "malformed", frame.malformed)
            :add_proto_expert_info(E.malformed, format("Malformed: %s (%s)", REASONS[frame.malformed], frame.malformed))
    end
    if frame.cut then tree:add_proto_expert_info(E.cut) end
    local texts = {}
    if frame.src_node then
        show_header(tree, frame)
        texts = show_chunks(tree, frame, raw)
        show_rest(tree, frame)
    end
    return summary(frame, texts)
end

local itself

function portolan.dissector(tvb, pinfo, root)
    local raw = tvb:len() > 0 and tvb:raw(0, tvb:len()) or ""
    if not CRC_LOW then prepare_crc() end
    local frame = read_frame(raw, tvb:reported_len())
    -- A frame inside an ICMP error was not sent again, and the packet is not ours.
    local quoted = pinfo.in_error_pkt
    if not quoted then
        frame.record = known.records[pinfo.number]
        if not pinfo.visited or not frame.record then frame.record = link_frame(frame, raw, pinfo.number, pinfo.rel_ts) end
    end
    itself = itself or Dissector.get("portolan")
    shown.tvb, shown.fields, shown.all = tvb, root:referenced(itself), root.visible
    local tree = root:add(portolan, tvb)
    local line = show_frame(tree, frame, raw)
    tree:append_text(", " .. line)
    if not quoted then
        pinfo.cols.protocol = "Portolan"
        pinfo.cols.info = line
    end
    return tvb:len()
end

-- ---- where frames are found ----

local udp_ports = DissectorTable.get("udp.port")
local registered

local function take_ports()
    local wanted = portolan.prefs.udp_ports
    if wanted == registered then return end
    if registered and registered ~= "" then udp_ports:remove(registered, portolan) end
    if wanted ~= "" then udp_ports:add(wanted, portolan) end
    registered = wanted
end
portolan.prefs_changed = take_ports
take_ports()

DissectorTable.get("ethertype"):add(ETHERTYPE, portolan)
