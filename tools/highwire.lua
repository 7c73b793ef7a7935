-- Highwire's packets in Wireshark: every field of docs/protocol/wire.md, by its name there.
--
-- Use it without installing anything:
--
--     highwire ping --pcap run.pcap udp:10.0.0.7:7000
--     wireshark -X lua_script:tools/highwire.lua run.pcap
--     tshark -X lua_script:tools/highwire.lua -r run.pcap -O highwire
--
-- or copy it to the folder that Wireshark names under Help, About, Folders, Personal Lua Plugins. It reads
-- captures of tcpdump just as well.
--
-- Packets are recognised by their shape, on any port of UDP. A port that Wireshark takes for something else
-- needs a word: `-d udp.port==7000,highwire`, in the menu Analyze, Decode As; or
-- `-o udp.try_heuristic_first:TRUE`. What is malformed in a conversation that was recognised is shown as
-- Highwire too, with expert information that says what is wrong; `highwire.malformed` finds it.
--
-- Of sealed packets the header is shown, and that the rest is ciphertext: the keys of a session are in no
-- file. Useful filters:
--
--     highwire.kind == 4                                 ack packets
--     highwire.vi == 2 && highwire.message == 7          all pieces of a message
--     highwire.kind == 5 && highwire.length > 0          sizes that are tried
--     highwire.checksum.status == 0                      damaged on the way
--     highwire.overrun                                   the receiver's buffer was too small
--     highwire.kind == 7 || highwire.list > 0            transfers that have a receive list

local highwire = Proto("highwire", "Highwire")

local HEADER = 64
local HELLO = 1200
local OFFER = 24
local CONTROL_MAX = 128
local RANGES_MAX, CREDITS_MAX, LISTS_MAX = 32, 64, 15

local KINDS = { "Hello", "Welcome", "Data", "Ack", "Probe", "Close", "Fast", "Renew" }
local KIND = { HELLO = 1, WELCOME = 2, DATA = 3, ACK = 4, PROBE = 5, CLOSE = 6, FAST = 7, RENEW = 8 }
local WORDS = { "request", "grant", "refusal", "done" }
local WORD = { REQUEST = 1, GRANT = 2, REFUSAL = 3, DONE = 4 }
local NEVER = 0xffffffff
local FIRST, LAST, TOKEN, ACKNOWLEDGE, UNRELIABLE, SEALED, UNKNOWN = 2, 4, 8, 16, 32, 64, 128
local NOTES = {
    "open", "accepted", "refused", "closed", "withdrawn",
    "write", "read", "go", "written", "denied",
}
local WRITE, READ, GO, DENIED = 6, 7, 8, 10
local REASONS = {
    [0] = "not granted", "wrong tag", "out of range", "may only be read", "withdrawn", "no room", "wrong length",
}
-- VI 1 carries notes: which VIs are opened and closed, and what is done with remote memory.
local NOTES_VI, NOTE = 1, 12

local BYTES, PACKETS = { " byte", " bytes" }, { " packet", " packets" }

local f = {
    version = ProtoField.uint8("highwire.version", "Version"),
    kind = ProtoField.uint8("highwire.kind", "Kind", base.DEC, KINDS),
    flags = ProtoField.uint8("highwire.flags", "Flags", base.HEX),
    phase = ProtoField.bool("highwire.flags.phase", "Phase: parity of the key", 8, nil, 1),
    first = ProtoField.bool("highwire.flags.first", "First packet of its message", 8, nil, FIRST),
    last = ProtoField.bool("highwire.flags.last", "Last packet of its message", 8, nil, LAST),
    by_token = ProtoField.bool("highwire.flags.token", "Goes where a token says", 8, nil, TOKEN),
    acknowledge = ProtoField.bool("highwire.flags.acknowledge", "Acknowledge", 8, nil, ACKNOWLEDGE),
    unreliable = ProtoField.bool("highwire.flags.unreliable", "Unreliable", 8, nil, UNRELIABLE),
    sealed = ProtoField.bool("highwire.flags.sealed", "Sealed", 8, nil, SEALED),
    unknown = ProtoField.bool("highwire.flags.unknown", "Unknown", 8, nil, UNKNOWN),
    list = ProtoField.uint8("highwire.list", "List"),
    session = ProtoField.uint32("highwire.session", "Session, as the receiver numbers it"),
    number = ProtoField.uint64("highwire.number", "Packet number"),
    vi = ProtoField.uint32("highwire.vi", "VI, as the receiver numbers it"),
    message = ProtoField.uint32("highwire.message", "Message"),
    offset = ProtoField.uint32("highwire.offset", "Offset in the message", base.UNIT_STRING, BYTES),
    length = ProtoField.uint16("highwire.length", "Length", base.UNIT_STRING, BYTES),
    control_length = ProtoField.uint8("highwire.control_length", "Control bytes", base.UNIT_STRING, BYTES),
    epoch = ProtoField.uint8("highwire.epoch", "Epoch: handshakes since the first"),
    settled = ProtoField.uint64("highwire.settled", "Settled: nothing below this number is awaited"),
    reserved = ProtoField.bytes("highwire.reserved", "Reserved"),
    ack = ProtoField.uint64("highwire.ack", "Acknowledged", base.HEX),
    ack_next = ProtoField.uint64("highwire.ack.next", "Number after the latest run"),
    ack_count = ProtoField.uint16("highwire.ack.count", "Length of the latest run", base.UNIT_STRING, PACKETS),
    credit = ProtoField.uint32("highwire.credit", "Credit: receives posted since the VI began"),
    receive = ProtoField.uint32("highwire.receive", "Receive that the message fills"),
    overruns = ProtoField.uint32("highwire.overruns", "Overruns: datagrams dropped for want of room"),
    buffer = ProtoField.uint32("highwire.buffer", "Receive buffer", base.UNIT_STRING, BYTES),
    tag = ProtoField.bytes("highwire.tag", "Tag"),
    checksum = ProtoField.uint32("highwire.checksum", "Checksum (CRC32C)", base.HEX),
    checksum_status = ProtoField.uint8("highwire.checksum.status", "Checksum status", base.DEC,
        { [0] = "Bad", [1] = "Good", [2] = "Unverified" }),
    checksum_wanted = ProtoField.uint32("highwire.checksum.calculated", "Calculated checksum", base.HEX),

    random = ProtoField.bytes("highwire.random", "Random bytes"),
    public_key = ProtoField.bytes("highwire.public_key", "Ephemeral public key"),
    offer = ProtoField.none("highwire.offer", "Offer"),
    offer_version = ProtoField.uint8("highwire.offer.version", "Version"),
    offer_session = ProtoField.uint32("highwire.offer.session", "Session, as the sender numbers it"),
    offer_bytes = ProtoField.uint32("highwire.offer.message_bytes_max", "Longest message taken", base.UNIT_STRING, BYTES),
    offer_death = ProtoField.uint32("highwire.offer.death_ms", "Death after silence of", base.UNIT_STRING, { " ms" }),
    offer_incarnation = ProtoField.uint64("highwire.offer.incarnation", "Incarnation", base.HEX),
    offer_tag = ProtoField.bytes("highwire.offer.tag", "Tag of the offer"),
    padding = ProtoField.bytes("highwire.padding", "Padding"),

    preface = ProtoField.none("highwire.preface", "Preface"),
    total = ProtoField.uint32("highwire.total", "Length of the whole message", base.UNIT_STRING, BYTES),
    immediate = ProtoField.uint32("highwire.immediate", "Immediate data"),
    token = ProtoField.uint64("highwire.token", "Token", base.HEX),
    control = ProtoField.bytes("highwire.control", "Control bytes"),
    payload = ProtoField.bytes("highwire.payload", "Payload"),
    ciphertext = ProtoField.bytes("highwire.ciphertext", "Sealed: ciphertext"),

    note = ProtoField.none("highwire.note", "Note"),
    note_kind = ProtoField.uint8("highwire.note.kind", "Kind", base.DEC, NOTES),
    note_detail = ProtoField.uint8("highwire.note.detail", "Detail"),
    note_to = ProtoField.uint32("highwire.note.to", "To: the receiver's number of the VI"),
    note_vi = ProtoField.uint32("highwire.note.vi", "The sender's number of the VI"),
    note_id = ProtoField.uint32("highwire.note.id", "Which write or read"),
    note_handle = ProtoField.uint32("highwire.note.handle", "Region"),
    note_tag = ProtoField.uint32("highwire.note.tag", "Tag"),
    note_offset = ProtoField.uint64("highwire.note.offset", "Offset in the region"),
    note_length = ProtoField.uint64("highwire.note.length", "Length"),
    note_token = ProtoField.uint64("highwire.note.token", "Payload token", base.HEX),
    note_reason = ProtoField.uint8("highwire.note.reason", "Reason", base.DEC, REASONS),
    note_bytes = ProtoField.uint64("highwire.note.bytes", "Bytes of the region"),

    word = ProtoField.uint32("highwire.fast.word", "Word about a receive list", base.DEC, WORDS),
    request = ProtoField.uint32("highwire.fast.request", "Request"),
    fast_list = ProtoField.uint32("highwire.fast.list", "Receive list"),
    fast_bytes = ProtoField.uint32("highwire.fast.bytes", "Bytes to come", base.UNIT_STRING, BYTES),
    after = ProtoField.uint32("highwire.fast.after", "To be asked for again after", base.UNIT_STRING, { " µs" }),

    delay = ProtoField.uint32("highwire.ack.delay", "Since the highest number came", base.UNIT_STRING, { " µs" }),
    ranges = ProtoField.uint8("highwire.ack.ranges", "Ranges"),
    range = ProtoField.none("highwire.ack.range", "Range"),
    range_start = ProtoField.uint64("highwire.ack.range.start", "Start"),
    range_length = ProtoField.uint32("highwire.ack.range.length", "Length", base.UNIT_STRING, PACKETS),
    credits = ProtoField.uint8("highwire.ack.credits", "Credits"),
    vi_credit = ProtoField.none("highwire.ack.credit", "Credit"),
    credit_vi = ProtoField.uint32("highwire.ack.credit.vi", "VI, as the receiver numbers it"),
    credit_count = ProtoField.uint32("highwire.ack.credit.credit", "Receives posted since the VI began"),
}

local e = {
    malformed = ProtoExpert.new("highwire.malformed", "Malformed", expert.group.MALFORMED, expert.severity.ERROR),
    checksum = ProtoExpert.new("highwire.checksum.bad", "The checksum is wrong", expert.group.CHECKSUM,
        expert.severity.ERROR),
    cut = ProtoExpert.new("highwire.cut", "Cut by the capture", expert.group.UNDECODED, expert.severity.NOTE),
    sealed = ProtoExpert.new("highwire.is_sealed", "Sealed: the rest is ciphertext", expert.group.DECRYPTION,
        expert.severity.CHAT),
    overrun = ProtoExpert.new("highwire.overrun", "The sender's receive buffer has overflowed", expert.group.SEQUENCE,
        expert.severity.NOTE),
}

local fields, experts = {}, {}
for _, field in pairs(f) do fields[#fields + 1] = field end
for _, expert in pairs(e) do experts[#experts + 1] = expert end
highwire.fields = fields
highwire.experts = experts
highwire.prefs.verify = Pref.bool("Verify checksums", true, "Calculate the CRC32C of packets that are not sealed")

-- Which library there is depends on the version of Lua inside Wireshark.
local bits = rawget(_G, "bit") or rawget(_G, "bit32")
local band, bxor, rshift = bits.band, bits.bxor, bits.rshift

local function has(flags, flag) return band(flags, flag) ~= 0 end

-- ── Checksum ───────────────────────────────────────────────────────────────────────────────────────

local CRC = {}
for byte = 0, 255 do
    local crc = byte
    for _ = 1, 8 do
        local odd = band(crc, 1) == 1
        crc = rshift(crc, 1)
        if odd then crc = bxor(crc, 0x82f63b78) end
    end
    CRC[byte] = crc
end

local function crc32c(crc, text)
    for at = 1, #text do
        crc = bxor(rshift(crc, 8), CRC[band(bxor(crc, text:byte(at)), 0xff)])
    end
    return crc
end

-- Of everything but the tag.
local function checksum_of(tvb)
    local crc = crc32c(0xffffffff, tvb:raw(0, 48))
    if tvb:len() > HEADER then crc = crc32c(crc, tvb:raw(HEADER, tvb:len() - HEADER)) end
    return bxor(crc, 0xffffffff) % 0x100000000
end

-- ── Parts ──────────────────────────────────────────────────────────────────────────────────────────

-- What was captured of `length` bytes at `at`; nil if that is nothing.
local function captured(tvb, at, length)
    length = math.min(length, tvb:len() - at)
    if length > 0 then return tvb(at, length) end
end

local function malformed(tree, text) tree:add_proto_expert_info(e.malformed, text) end

local function all_zero(tvb, at, length)
    local range = captured(tvb, at, length)
    return range == nil or not range:raw():find("[^\0]")
end

local function add_flags(tree, tvb)
    local flags = tree:add(f.flags, tvb(2, 1))
    for _, flag in ipairs { f.phase, f.first, f.last, f.by_token, f.acknowledge, f.unreliable, f.sealed, f.unknown } do
        flags:add(flag, tvb(2, 1))
    end
    if has(tvb(2, 1):uint(), UNKNOWN) then malformed(flags, "Unknown flag 128: packets with it are dropped") end
end

local function add_ack(tree, tvb)
    -- In the lower 16 bits how many, in the upper 48 the number after the last.
    local count, after = tvb(32, 2):le_uint(), tvb(34, 6):le_uint64():tonumber()
    local ack = tree:add_le(f.ack, tvb(32, 8))
    if count == 0 then
        ack:set_text("Acknowledged: nothing")
    else
        ack:set_text(string.format("Acknowledged: the latest run is %d to %d", after - count, after - 1))
    end
    ack:add(f.ack_next, tvb(34, 6), tvb(34, 6):le_uint64())
    ack:add_le(f.ack_count, tvb(32, 2))
    if count > after then malformed(ack, "The run begins before packet 0") end
end

-- Everything up to the tag, and what holds for all kinds.
local function add_header(tree, tvb, kind, flags)
    local version = tree:add(f.version, tvb(0, 1))
    if tvb(0, 1):uint() ~= 1 then malformed(version, "Another version: packets of it are dropped unread") end
    local kind_item = tree:add(f.kind, tvb(1, 1))
    if not KINDS[kind] then malformed(kind_item, "Unknown kind: packets of it are dropped") end
    add_flags(tree, tvb)
    tree:add(f.list, tvb(3, 1))
    tree:add_le(f.session, tvb(4, 4))
    tree:add_le(f.number, tvb(8, 8))
    if kind == KIND.ACK then
        tree:add(f.reserved, tvb(16, 4))
        local overruns = tree:add_le(f.overruns, tvb(20, 4))
        if tvb(20, 4):le_uint() > 0 then overruns:add_proto_expert_info(e.overrun) end
        tree:add_le(f.buffer, tvb(24, 4))
    elseif kind == KIND.PROBE then
        tree:add_le(f.vi, tvb(16, 4))
        tree:add_le(f.settled, tvb(20, 8))
    else
        tree:add_le(f.vi, tvb(16, 4))
        tree:add_le(f.message, tvb(20, 4))
        tree:add_le(f.offset, tvb(24, 4))
    end
    local length = tree:add_le(f.length, tvb(28, 2))
    local said, there = tvb(28, 2):le_uint(), tvb:reported_len() - HEADER
    if said > there or said < there and kind ~= KIND.HELLO then
        malformed(length, string.format("The length is %d, but %d bytes follow the header", said, there))
    end
    local control = tree:add(f.control_length, tvb(30, 1))
    if tvb(30, 1):uint() > CONTROL_MAX then malformed(control, "More than 128 control bytes") end
    local epoch = tree:add(f.epoch, tvb(31, 1))
    if tvb(31, 1):uint() ~= 0 and not has(tvb(2, 1):uint(), SEALED) then
        malformed(epoch, "Byte 31 is not 0 and the packet not sealed: packets like it are dropped")
    end
    add_ack(tree, tvb)
    tree:add_le(f.credit, tvb(40, 4))
    tree:add_le(f.receive, tvb(44, 4))
end

local function add_tag(tree, tvb, kind, flags)
    if has(flags, SEALED) then
        local tag = tree:add(f.tag, tvb(48, 16))
        if kind <= KIND.WELCOME and not all_zero(tvb, 48, 16) then malformed(tag, "It must be 0 in this kind") end
        return
    end
    local item = tree:add_le(f.checksum, tvb(48, 4))
    local status = 2
    if highwire.prefs.verify and tvb:len() == tvb:reported_len() then
        local wanted = checksum_of(tvb)
        status = wanted == tvb(48, 4):le_uint() and 1 or 0
        if status == 0 then
            item:add_proto_expert_info(e.checksum)
            tree:add(f.checksum_wanted, tvb(48, 4), wanted):set_generated()
        end
    end
    tree:add(f.checksum_status, tvb(48, 4), status):set_generated()
    local rest = tree:add(f.reserved, tvb(52, 12))
    if not all_zero(tvb, 52, 12) then malformed(rest, "Not 0 behind the checksum") end
end

local function add_ciphertext(tree, tvb, at, length)
    local range = captured(tvb, at, length)
    if range then tree:add(f.ciphertext, range):add_proto_expert_info(e.sealed) end
end

-- ── Kinds: what is behind the header, and what is said of it in a line ─────────────────────────────

local function add_offer(tree, tvb, at)
    local range = captured(tvb, at, OFFER)
    if not range or range:len() < OFFER then return "" end
    local offer = tree:add(f.offer, range)
    local version = offer:add(f.offer_version, tvb(at, 1))
    if tvb(at, 1):uint() ~= 2 then malformed(version, "An offer of another version is refused") end
    offer:add(f.reserved, tvb(at + 1, 3))
    local session = offer:add_le(f.offer_session, tvb(at + 4, 4))
    if tvb(at + 4, 4):le_uint() == 0 then malformed(session, "No session has the number 0") end
    offer:add_le(f.offer_bytes, tvb(at + 8, 4))
    offer:add_le(f.offer_death, tvb(at + 12, 4))
    offer:add_le(f.offer_incarnation, tvb(at + 16, 8))
    return ", offers session " .. tvb(at + 4, 4):le_uint()
end

-- Hello and welcome. [W-6]: nothing but constants, and in a welcome the session that the hello offered.
local function add_greeting(tree, tvb, kind, flags)
    local sealed = has(flags, SEALED)
    local said, wanted = tvb(28, 2):le_uint(), sealed and 72 or 56
    if said ~= wanted then malformed(tree, string.format("The length is %d and must be %d", said, wanted)) end
    local session = kind == KIND.HELLO and 4 or 8
    if not (all_zero(tvb, session, 28 - session) and all_zero(tvb, 30, 18) and tvb(3, 1):uint() == 0) then
        malformed(tree, "Fields that this kind does not use are not 0")
    end
    if flags ~= 0 and flags ~= SEALED then malformed(tree, "No flag but sealed is allowed in this kind") end
    if kind == KIND.HELLO and tvb:reported_len() ~= HELLO then
        malformed(tree, string.format("%d bytes: a hello has exactly 1200", tvb:reported_len()))
    end
    local bytes = captured(tvb, HEADER, 32)
    if bytes then tree:add(sealed and f.public_key or f.random, bytes) end
    local told, stop = "", HEADER + wanted
    if sealed then
        add_ciphertext(tree, tvb, 96, OFFER)
        local tag = captured(tvb, 96 + OFFER, 16)
        if tag then tree:add(f.offer_tag, tag) end
    else
        told = add_offer(tree, tvb, 96)
    end
    local padding = captured(tvb, stop, tvb:reported_len() - stop)
    if padding then
        local item = tree:add(f.padding, padding)
        if not all_zero(tvb, stop, padding:len()) then malformed(item, "Not 0") end
    end
    return told
end

-- What notes about remote memory have beside the twelve bytes of every note.
local function add_memory(note, tvb, at, kind, length)
    if (kind == WRITE and length >= 36) or (kind == READ and length >= 44) then
        note:add_le(f.note_handle, tvb(at + 12, 4))
        note:add_le(f.note_tag, tvb(at + 16, 4))
        note:add_le(f.note_offset, tvb(at + 20, 8))
        note:add_le(f.note_length, tvb(at + 28, 8))
        if kind == READ then note:add_le(f.note_token, tvb(at + 36, 8)) end
    elseif kind == GO and length >= 20 then
        note:add_le(f.note_token, tvb(at + 12, 8))
    elseif kind == DENIED then
        local reason = tvb(at + 1, 1)
        note:add(f.note_reason, reason)
        if reason:uint() == 2 and length >= 20 then note:add_le(f.note_bytes, tvb(at + 12, 8)) end
    end
end

local function add_note(tree, tvb, at, length)
    local note = tree:add(f.note, tvb(at, length))
    note:add(f.note_kind, tvb(at, 1))
    note:add(f.note_detail, tvb(at + 1, 1))
    note:add_le(f.note_to, tvb(at + 4, 4))
    local number = tvb(at, 1):uint()
    local kind = NOTES[number] or "unknown"
    if number >= WRITE and number <= DENIED then
        note:add_le(f.note_id, tvb(at + 8, 4))
        add_memory(note, tvb, at, number, length)
    else
        note:add_le(f.note_vi, tvb(at + 8, 4))
    end
    note:append_text(": " .. kind)
    return ", note: " .. kind
end

local function add_data(tree, tvb, _, flags)
    local vi, message, offset = tvb(16, 4):le_uint(), tvb(20, 4):le_uint(), tvb(24, 4):le_uint()
    local control, length = tvb(30, 1):uint(), tvb:reported_len() - HEADER
    local told = string.format(", VI %d, message %d", vi, message)
    local receive = has(flags, TOKEN) and "" or string.format(", receive %d", tvb(44, 4):le_uint())
    if has(flags, SEALED) then
        add_ciphertext(tree, tvb, HEADER, length)
        return string.format("%s, offset %d, %d bytes of ciphertext%s", told, offset, length, receive)
    end
    local at = HEADER
    local total, note = nil, ""
    if has(flags, FIRST) then
        local token_at = at + 8
        local control_at = has(flags, TOKEN) and token_at + 8 or token_at
        local preface_length = control_at + control - at
        if length < preface_length then
            malformed(tree, string.format("A preface of %d bytes is cut short: %d are there", preface_length, length))
            return told .. ", preface cut short"
        end
        if offset ~= 0 then malformed(tree, "The first packet of a message has offset 0") end
        local range = captured(tvb, at, preface_length)
        if not range or range:len() < preface_length then return told end
        local preface = tree:add(f.preface, range)
        preface:add_le(f.total, tvb(at, 4))
        preface:add_le(f.immediate, tvb(at + 4, 4))
        if has(flags, TOKEN) then preface:add_le(f.token, tvb(token_at, 8)) end
        if control > 0 then preface:add(f.control, tvb(control_at, control)) end
        total = tvb(at, 4):le_uint()
        if vi == NOTES_VI and control >= NOTE and total == 0 then
            note = add_note(preface, tvb, control_at, control)
        end
        at, length = at + preface_length, length - preface_length
        if length > total then
            malformed(tree, string.format("%d bytes of payload in a message of %d", length, total))
        end
    elseif control > 0 then
        malformed(tree, "Control bytes in a packet that is not the first")
    end
    local payload = captured(tvb, at, length)
    if payload then tree:add(f.payload, payload) end
    local of = total and string.format(" of %d", total) or ""
    return string.format("%s, offset %d, %d bytes%s%s%s", told, offset, length, of, receive, note)
end

-- One that is not exactly as long as its counts say is not believed.
local function add_ack_packet(tree, tvb, _, flags)
    local length = tvb:reported_len() - HEADER
    if has(flags, SEALED) then
        add_ciphertext(tree, tvb, HEADER, length)
        return ""
    end
    if tvb:len() < tvb:reported_len() then return "" end
    if length < 6 then
        malformed(tree, string.format("%d bytes: an ack has at least 6", length))
        return ", too short"
    end
    tree:add_le(f.delay, tvb(HEADER, 4))
    local ranges, at = tvb(HEADER + 4, 1):uint(), HEADER + 5
    local ranges_item = tree:add(f.ranges, tvb(HEADER + 4, 1))
    if ranges > RANGES_MAX then malformed(ranges_item, "More than 32 ranges") end
    if at + 12 * ranges + 1 > tvb:len() then
        malformed(ranges_item, string.format("%d ranges do not fit %d bytes", ranges, length))
        return ", too short"
    end
    for _ = 1, ranges do
        local start, count = tvb(at, 8):le_uint64(), tvb(at + 8, 4):le_uint()
        local item = tree:add(f.range, tvb(at, 12))
        item:set_text(string.format("Range: %s to %s", start, start + UInt64(count) - UInt64(1)))
        item:add_le(f.range_start, tvb(at, 8))
        local length_item = item:add_le(f.range_length, tvb(at + 8, 4))
        if count == 0 then malformed(length_item, "A range of nothing") end
        at = at + 12
    end
    local credits = tvb(at, 1):uint()
    local credits_item = tree:add(f.credits, tvb(at, 1))
    at = at + 1
    if credits > CREDITS_MAX then malformed(credits_item, "More than 64 credits") end
    if at + 8 * credits ~= tvb:len() then
        local there = tvb:len() - at
        malformed(credits_item, string.format("%d credits are %d bytes, and %d are there", credits, 8 * credits, there))
        return ", not as long as it says"
    end
    for _ = 1, credits do
        local item = tree:add(f.vi_credit, tvb(at, 8))
        item:set_text(string.format("Credit: VI %d, %d receives", tvb(at, 4):le_uint(), tvb(at + 4, 4):le_uint()))
        item:add_le(f.credit_vi, tvb(at, 4))
        item:add_le(f.credit_count, tvb(at + 4, 4))
        at = at + 8
    end
    return string.format(", %d ranges, %d credits", ranges, credits)
end

-- Zeros behind the header try whether a packet of that size passes; a VI is named whose credit is asked for.
local function add_probe(tree, tvb, _, flags)
    local length, vi = tvb:reported_len() - HEADER, tvb(16, 4):le_uint()
    local told = vi ~= 0 and ", asks for credit of VI " .. vi or ""
    if length == 0 then return told end
    if has(flags, SEALED) then
        add_ciphertext(tree, tvb, HEADER, length)
    else
        local zeros = captured(tvb, HEADER, length)
        if zeros then tree:add(f.padding, zeros) end
    end
    return string.format("%s, tries %d bytes", told, tvb:reported_len())
end

-- A header alone.
local function add_nothing(tree, tvb, _, flags)
    local range = captured(tvb, HEADER, tvb:reported_len() - HEADER)
    if range then tree:add(has(flags, SEALED) and f.ciphertext or f.payload, range) end
    return ""
end

-- A word about a receive list: in the places of message, offset, credit and receive.
local function add_fast(tree, tvb, kind, flags)
    add_nothing(tree, tvb, kind, flags)
    local word, credit, receive = tvb(24, 4):le_uint(), tvb(40, 4):le_uint(), tvb(44, 4):le_uint()
    local item = tree:add_le(f.word, tvb(24, 4))
    tree:add_le(f.request, tvb(20, 4))
    local told = string.format(", VI %d: %s %d", tvb(16, 4):le_uint(), WORDS[word] or "unknown", tvb(20, 4):le_uint())
    if tvb(3, 1):uint() ~= 0 then malformed(tree, "A word about a list goes by none") end
    if word == WORD.REQUEST then
        tree:add_le(f.fast_bytes, tvb(40, 4))
        return string.format("%s, %d bytes", told, credit)
    elseif word == WORD.GRANT or word == WORD.DONE then
        local list = tree:add_le(f.fast_list, tvb(44, 4))
        if receive > 255 or receive == 0 and word == WORD.GRANT then malformed(list, "There is no such list") end
        return string.format("%s, list %d", told, receive)
    elseif word == WORD.REFUSAL then
        local list = tree:add_le(f.fast_list, tvb(40, 4))
        if credit > 255 then malformed(list, "There is no such list") end
        local after = tree:add_le(f.after, tvb(44, 4))
        if receive == NEVER then after:set_text("Never to be asked for again") end
        local whose = credit ~= 0 and string.format(", list %d is another's", credit) or ""
        return told .. whose .. (receive == NEVER and ", never" or string.format(", again after %d µs", receive))
    end
    malformed(item, "Unknown word: it is passed over")
    return told
end

local REST = { add_greeting, add_greeting, add_data, add_ack_packet, add_probe, add_nothing, add_fast }

-- ── The whole ──────────────────────────────────────────────────────────────────────────────────────

local function told_flags(flags)
    local names = {}
    for _, flag in ipairs { { FIRST, "first" }, { LAST, "last" }, { TOKEN, "token" }, { ACKNOWLEDGE, "acknowledge" },
        { UNRELIABLE, "unreliable" }, { SEALED, "sealed" } } do
        if has(flags, flag[1]) then names[#names + 1] = flag[2] end
    end
    return #names > 0 and " [" .. table.concat(names, " ") .. "]" or ""
end

function highwire.dissector(tvb, pinfo, root)
    pinfo.cols.protocol = "Highwire"
    local tree = root:add(highwire, tvb())
    if tvb:reported_len() < HEADER then
        malformed(tree, string.format("%d bytes: shorter than a header", tvb:reported_len()))
        pinfo.cols.info = "Shorter than a header"
        return tvb:len()
    end
    if tvb:len() < tvb:reported_len() then tree:add_proto_expert_info(e.cut) end
    if tvb:len() < HEADER then
        pinfo.cols.info = "Cut by the capture"
        return tvb:len()
    end
    local kind, flags = tvb(1, 1):uint(), tvb(2, 1):uint()
    add_header(tree, tvb, kind, flags)
    add_tag(tree, tvb, kind, flags)
    local told = REST[kind] and tvb(0, 1):uint() == 1 and REST[kind](tree, tvb, kind, flags) or ""
    local name = KINDS[kind] or "Unknown kind " .. kind
    if kind > KIND.WELCOME then name = string.format("%s %s", name, tvb(8, 8):le_uint64()) end
    local count, after = tvb(32, 2):le_uint(), tvb(34, 6):le_uint64():tonumber()
    local acked = count > 0 and string.format(", ack %d..%d", after - count, after - 1) or ""
    local line = string.format("%s%s%s%s", name, told, acked, told_flags(flags))
    pinfo.cols.info = line
    tree:append_text(": " .. line)
    return tvb:len()
end

-- Looks like ours: what a receiver checks before it opens a packet.
local function looks_right(tvb)
    if tvb:reported_len() < HEADER or tvb:len() < 32 then return false end
    local kind, said, there = tvb(1, 1):uint(), tvb(28, 2):le_uint(), tvb:reported_len() - HEADER
    return tvb(0, 1):uint() == 1 and KINDS[kind] ~= nil and not has(tvb(2, 1):uint(), UNKNOWN)
        and tvb(3, 1):uint() <= LISTS_MAX and tvb(30, 1):uint() <= CONTROL_MAX and tvb(31, 1):uint() == 0
        and (said == there or kind == KIND.HELLO and tvb:reported_len() == HELLO)
end

highwire:register_heuristic("udp", function(tvb, pinfo, root)
    if not looks_right(tvb) then return false end
    highwire.dissector(tvb, pinfo, root)
    -- What follows is ours even where it is malformed.
    pinfo.conversation = highwire
    return true
end)
DissectorTable.get("udp.port"):add_for_decode_as(highwire)
