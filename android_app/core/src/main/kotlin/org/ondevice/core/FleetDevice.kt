package org.ondevice.core

import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.security.MessageDigest
import java.security.SecureRandom
import kotlin.math.sqrt

/** What a fleet agreed on, as far as a device needs it; `ondevice/fleet/charter.py` has all of it. */
class FleetCharter(val bytes: ByteArray) {
    private val fields: Map<*, *>
    private val fleet: Map<*, *>

    init {
        val value = try {
            Json.parse(Storage.decode(bytes))
        } catch (_: Exception) {
            null
        }
        fields = value as? Map<*, *> ?: throw fleetError("this is no charter of a fleet")
        if (fields["kind"] != null) throw fleetError("this fleet's devices send adapters", "a fleet of numbers", hint = "a file carries numbers alone")
        fleet = fields["fleet"] as? Map<*, *> ?: throw fleetError("this is no charter of a fleet")
        if (long("version") != FleetReader.VERSION.toLong()) throw fleetError("the fleet is of another version", "version ${FleetReader.VERSION}", fields["version"])
        if (fleet["secure"] == true) throw fleetError("a secure fleet's rounds need a network: its devices talk four times in each")
        if (fields["subspace"] != null || fields["optimizer"] != null) {
            throw fleetError("this fleet trains in a gradient's subspace, a file of megabytes", "subspace: seed, optimizer: sgd", hint = "begin the fleet with method.subspace=random")
        }
        if (fields["objective"] != null) throw fleetError("this fleet learns from preferences, and a phone's rounds are on the loss of its rows")
        if (fields["noise"] != "rademacher") throw fleetError("this device knows random signs alone", "noise: rademacher", fields["noise"])
    }

    /** Number of the fleet in messages. */
    val id: Int = ByteBuffer.wrap(MessageDigest.getInstance("SHA-256").digest(bytes)).order(ByteOrder.LITTLE_ENDIAN).int
    val modelSha256 = fields["model_sha256"] as? String
    val modelSource = fields["model_source"] as? String ?: ""
    val seed = long("seed")
    val size = long("size")
    val queries = long("queries").toInt()
    val localSteps = (fleet["local_steps"] as? Long ?: 1L).toInt()
    val mostRows = fleet["most_rows"] as? Long ?: 10_000L
    val clipNorm = (fleet["clip_norm"] as? Number)?.toDouble()
    private val deviceKeys = fields["device_keys"] as? List<*> ?: emptyList<Any>()

    /** Whether only named devices may reply, each with a signature. */
    val needsSignature get() = deviceKeys.isNotEmpty()

    /** Refuse a task that is not the one that this charter has for its round, so that no round can be asked twice. */
    fun check(task: FleetTask) {
        if (task.fleet != id) throw fleetError("the task is of another fleet", name, hex(task.fleet))
        val first = task.round.toLong() * localSteps
        val ahead = task.firstStep - first
        val isAllowed = if (fleet["seeds"] == "own") ahead >= 0 && ahead % LANE == 0L else ahead == 0L
        if (task.localSteps != localSteps || !isAllowed) {
            throw fleetError(
                "the task has other local steps than the charter", "$localSteps steps from $first", "${task.localSteps} steps from ${task.firstStep}",
            )
        }
        val rate = (fields["learning_rate"] as? Number)?.toDouble() ?: throw fleetError("this is no charter of a fleet", "a number: learning_rate")
        val decay = fleet["decay_rounds"] as? Long
        val expected = (if (decay == null) rate else rate * maxOf(0.0, 1.0 - task.round.toDouble() / decay)).toFloat()
        if (task.learningRate != expected) throw fleetError("the task has another learning rate than the charter", expected, task.learningRate)
    }

    /** Refuse a key that the charter does not name, before any work is done. */
    fun check(key: FleetKey) {
        val fingerprint = Storage.sha256(key.public)
        if (needsSignature && fingerprint !in deviceKeys) {
            throw fleetError(
                "the fleet does not know this phone's key", "one of ${deviceKeys.size} keys", fingerprint,
                "share this phone's key with whoever runs the fleet, before it begins",
            )
        }
    }

    val noiseMultiplier = (fleet["noise_multiplier"] as? Number)?.toDouble() ?: 0.0
    private val momentum = minOf(Math.rint(((fleet["momentum"] as? Number)?.toDouble() ?: 0.0) * 256).toInt(), 255)

    fun state() = FleetState(size.toInt(), seed, queries, momentum)

    /** [id] as messages and commands write it. */
    val name = hex(id)

    /** Whether a program is of the fleet's model, size and seed. */
    fun fits(manifest: Manifest): Boolean = try {
        check(manifest)
        true
    } catch (_: OndeviceException) {
        false
    }

    /** Refuse a program of another model, size or seed. */
    fun check(manifest: Manifest) {
        fun same(what: String, expected: Any?, received: Any?) {
            if (expected != received) throw fleetError("the program is not the fleet's: $what", expected, received, "export the fleet's model with its method and seed")
        }
        same("the model", modelSha256, manifest.modelSha256)
        same("the adapter's size", size, manifest.spec.adapterSize.toLong())
        same("the seed", seed, manifest.generator.seed)
    }

    private companion object {
        /** Distance between the steps of devices that have their own seeds. */
        const val LANE = 1L shl 40
    }

    private fun long(name: String): Long = fields[name] as? Long ?: throw fleetError("this is no charter of a fleet", "a whole number: $name", fields[name]?.toString())
}

/** What a task is done with: this phone's program, and its rows encoded for it; [padId] is the id on padded positions. */
class FleetWork(val session: Session, val examples: List<Example>, val padId: Int)

/**
 * A file before it is taken: of which fleet it is, and what it asks for.
 *
 * @property outcomes rounds of the log in it.
 * @property task null where the file brings outcomes alone.
 */
class FleetOffer(val name: String, val data: ByteArray, val charter: FleetCharter, val outcomes: Int, val task: FleetTask?)

/**
 * This phone as a device of a fleet that it meets by files: no network. It follows the fleet's log in whole numbers, and
 * answers a round with one number a query and step of its own program over its own rows, which stay here.
 *
 * [folder] holds the charter and the state; both are written whole, so a kill loses no round that was taken. The record
 * of replies and this phone's key lie next to it and outlive the fleet.
 *
 * @param home the app's private folder.
 */
class FleetDevice(private val home: File) {
    private val folder = folder(home)
    private val charterFile = File(folder, "charter.json")
    private val stateFile = File(folder, "state.bin")
    var charter: FleetCharter? = if (charterFile.isFile) FleetCharter(charterFile.readBytes()) else null
        private set
    var state: FleetState? = charter?.state()?.also { if (stateFile.isFile) it.read(stateFile.readBytes(), stateFile.name) }
        private set

    /** What a file led to: [answer] is the file to send back, if it asked for one. */
    class Taken(val rounds: Int, val hash: String, val answer: ByteArray?, val loss: Double?)

    /** Read a file without taking it; nothing is written. */
    fun look(data: ByteArray, name: String): FleetOffer {
        val file = read(data, name)
        return FleetOffer(name, data, agreed(file, name), file.events.size, file.task?.let(FleetTask::read))
    }

    /**
     * Take a file: follow the rounds in it, and do its task.
     *
     * @param before called before each local step with its index and their number; what it throws ends the task, and
     *   the file may be taken again.
     * @param work asked for only where the file has a task.
     * @throws OndeviceException what is wrong with the file; the state is as far as its whole rounds.
     */
    fun take(data: ByteArray, name: String, before: (Int, Int) -> Unit = { _, _ -> }, work: () -> FleetWork): Taken {
        val file = read(data, name)
        val (agreed, now) = begun(file, name)
        for (bytes in file.events) {
            val event = FleetEvent.read(bytes)
            if (event.fleet != agreed.id) throw fleetError("$name is of another fleet", hex(agreed.id), hex(event.fleet))
            if (event.groups == null) throw fleetError("the fleet's frozen tensors changed; this device's program has the old ones", hint = "export the program anew")
            if (now.apply(event)) Storage.atomicWrite(stateFile, now.toBytes())
        }
        val task = file.task?.let(FleetTask::read)
        if (task == null) return Taken(now.round, Storage.hex(now.digest()), null, null)
        val device = file.device ?: throw fleetError("$name does not say which device it is for")
        agreed.check(task)
        val signer = if (agreed.needsSignature) FleetKey.open(home).also(agreed::check) else null
        val request = file.task!! + ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putLong(device).array()
        var loss: Double? = null
        val reply = FleetLedger(File(home, FleetLedger.FILE_NAME)).once(task, request, agreed.noiseMultiplier) {
            answer(task, device, agreed, now, before, work).also { loss = it.loss.toDouble() }.toBytes()
        }
        return Taken(now.round, Storage.hex(now.digest()), FleetFile(device = device, answer = reply, signed = signer?.sign(reply)).toBytes(), loss)
    }

    private fun read(data: ByteArray, name: String): FleetFile {
        val file = FleetFile.read(data, name)
        if (file.answer != null) throw fleetError("$name is an answer on its way to the server")
        return file
    }

    private fun agreed(file: FleetFile, name: String): FleetCharter {
        val given = file.charter?.let(::FleetCharter)
        val known = charter
        if (given != null && known != null && !given.bytes.contentEquals(known.bytes)) {
            throw fleetError("$name is of another fleet", hex(known.id), hex(given.id), "leave the fleet that this phone is in first")
        }
        return known ?: given ?: throw fleetError("this phone is in no fleet yet", "the fleet's first file, which has its charter")
    }

    private fun begun(file: FleetFile, name: String): Pair<FleetCharter, FleetState> {
        val agreed = agreed(file, name)
        if (charter == null) {
            Storage.atomicWrite(charterFile, agreed.bytes)
            charter = agreed
            state = agreed.state()
        }
        return agreed to state!!
    }

    private fun answer(
        task: FleetTask, device: Long, agreed: FleetCharter, now: FleetState, before: (Int, Int) -> Unit, work: () -> FleetWork,
    ): FleetAnswer {
        if (!task.begin.contentEquals(now.hash)) {
            throw fleetError(
                "the task of round ${task.round} begins from another state", Storage.hex(task.begin), Storage.hex(now.hash), "take the files before it first",
            )
        }
        val given = work()
        val session = given.session
        val manifest = session.manifest
        agreed.check(manifest)
        val batches = Batches(given.examples, manifest.batchSize, manifest.lengthsTokens, agreed.seed, given.padId)
        session.restart(now.flat())
        val numbers = ArrayList<Double>()
        var loss = 0.0
        try {
            for (step in 0 until task.localSteps) {
                before(step, task.localSteps)
                val result = session.step(batches.at(task.round * task.localSteps + step), task.firstStep + step, task.learningRate.toDouble())
                result.projectedGradients.forEach { numbers.add(it.toDouble()) }
                loss += result.loss
            }
        } finally {
            session.restart(now.flat())
        }
        loss /= task.localSteps
        if (!loss.isFinite() || numbers.any { !it.isFinite() }) {
            throw OndeviceException(ErrorKind.TRAINING, "the loss of round ${task.round} is not a finite number", received = "$loss", hint = "a smaller learning rate for the fleet")
        }
        if (numbers.size != agreed.localSteps * agreed.queries) throw fleetError("the program gives other numbers than the fleet's", agreed.localSteps * agreed.queries, numbers.size)
        val sent = private(numbers.toDoubleArray(), agreed)
        return FleetAnswer(task, device, minOf(given.examples.size.toLong(), agreed.mostRows).toInt(), loss.toFloat(), FleetNumbers.pack(sent))
    }

    /** Clip the numbers, and add the charter's noise: before anything leaves the phone. */
    private fun private(numbers: DoubleArray, agreed: FleetCharter): DoubleArray {
        val norm = agreed.clipNorm ?: return numbers
        val length = sqrt(numbers.sumOf { it * it })
        val clipped = if (length > norm) DoubleArray(numbers.size) { numbers[it] * (norm / length) } else numbers
        if (agreed.noiseMultiplier == 0.0) return clipped
        val draw = SecureRandom()
        return DoubleArray(clipped.size) { clipped[it] + agreed.noiseMultiplier * norm * draw.nextGaussian() }
    }

    companion object {
        /** Where a phone holds its fleet's charter and state; deleting it leaves the fleet. */
        fun folder(home: File) = File(home, "fleet")
    }
}

/** A fleet's number as messages and commands write it. */
private fun hex(id: Int) = "%08x".format(id)
