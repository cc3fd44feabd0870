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
    val noiseMultiplier = (fleet["noise_multiplier"] as? Number)?.toDouble() ?: 0.0
    private val momentum = minOf(Math.rint(((fleet["momentum"] as? Number)?.toDouble() ?: 0.0) * 256).toInt(), 255)

    fun state() = FleetState(size.toInt(), seed, queries, momentum)

    /** [id] as messages and commands write it. */
    val name = "%08x".format(id)

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
 * The folder holds the charter and the state; both are written whole, so a kill loses no round that was taken.
 */
class FleetDevice(private val folder: File) {
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
        val answer = task?.let { answer(it, file.device ?: throw fleetError("$name does not say which device it is for"), agreed, now, before, work) }
        return Taken(now.round, Storage.hex(now.digest()), answer?.let { FleetFile(device = file.device, answer = it.toBytes()).toBytes() }, answer?.loss?.toDouble())
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
        if (task.fleet != agreed.id) throw fleetError("the task is of another fleet", hex(agreed.id), hex(task.fleet))
        if (!task.begin.contentEquals(now.hash)) {
            throw fleetError(
                "the task of round ${task.round} begins from another state", Storage.hex(task.begin), Storage.hex(now.hash), "take the files before it first",
            )
        }
        if (task.localSteps != agreed.localSteps) throw fleetError("the task has other local steps than the charter", agreed.localSteps, task.localSteps)
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

    private fun hex(id: Int) = "%08x".format(id)
}
