package org.ondevice.app

import android.net.Uri
import org.ondevice.core.ArtifactInfo
import org.ondevice.core.Encoder
import org.ondevice.core.ErrorKind
import org.ondevice.core.FleetCharter
import org.ondevice.core.FleetDevice
import org.ondevice.core.FleetFile
import org.ondevice.core.FleetKey
import org.ondevice.core.FleetOffer
import org.ondevice.core.FleetWork
import org.ondevice.core.OndeviceException
import org.ondevice.core.PauseCause
import org.ondevice.core.PauseReason
import org.ondevice.core.PauseRules
import org.ondevice.core.Program
import org.ondevice.core.Rules
import org.ondevice.core.Session
import org.ondevice.core.Storage
import java.io.File

/** This phone in a fleet: what it holds, the file that is open, and the round that it works on. Fields for the main thread. */
class FleetRounds(private val app: OndeviceApp) : Watched() {
    /** Where this phone is in a fleet; [answer] is the file to send back, until another round is answered. */
    class Standing(val charter: FleetCharter, val rounds: Int, val hash: String, val answer: File?)

    /** A file that is being taken, with the model and the data of its task. */
    class Live(val offer: FleetOffer, val model: String?, val data: String?) {
        var step = 0
        var reasons: Set<PauseReason> = emptySet()
        var taken: FleetDevice.Taken? = null
        var error: OndeviceException? = null
        var begun = false

        @Volatile var stopAsked = false

        val isOver get() = taken != null || error != null
    }

    private class Stopped : RuntimeException()

    private val folder = FleetDevice.folder(app.filesDir)
    private val answers = File(app.filesDir, "fleet answers")

    var live: Live? = null
        private set
    var offer: FleetOffer? = null
        private set
    var standing: Standing? = null
        private set

    val isWorking get() = live?.let { !it.isOver } ?: false

    /** Whether there is something to leave, be it damaged. */
    val isMember get() = folder.exists()

    fun load() = app.jobs.run(FleetScreen.PLACE, app.getString(R.string.reading), { standing(FleetDevice(app.filesDir)) }) {
        standing = it
        changed()
    }

    /** Read a file that was picked, or that another app [sent]. Nothing of it counts before the user takes part. */
    fun open(uri: Uri, sent: Boolean) {
        app.jobs.cancel(FleetScreen.PLACE) // the newest file is the one to read
        app.import(FleetScreen.PLACE, app.getString(R.string.reading), sent, { imports ->
            val name = imports.name(uri)
            val data = imports.small(uri, MOST_BYTES)
                ?: throw OndeviceException(ErrorKind.FLEET, "$name carries no round of a fleet", "a *${FleetFile.SUFFIX} file below 2 kB", "a larger file")
            name to data
        }) { (name, data) -> look(name, data) }
    }

    private fun look(name: String, data: ByteArray) {
        app.jobs.run(FleetScreen.PLACE, app.getString(R.string.reading), {
            val device = FleetDevice(app.filesDir)
            device.look(data, name) to standing(device)
        }) { (found, now) ->
            offer = found
            standing = now
            if (!isWorking) live = null
            changed()
        }
    }

    /** Programs here that are the fleet's. */
    fun models(charter: FleetCharter): List<ArtifactInfo> = app.store.models().filter { model -> model.manifest?.let(charter::fits) == true }

    /** Set the open file up to be taken; [TrainService] then does it. */
    fun begin(model: String?, data: String?) {
        if (isWorking) return
        live = Live(offer ?: return, model, data)
        changed()
    }

    /** Take the file that is set up, unless it is being taken; false when there is none. */
    fun goOn(): Boolean {
        val now = live?.takeIf { !it.isOver } ?: return false
        if (!now.begun) {
            now.begun = true
            Thread({ drive(now) }, "ondevice-fleet").start()
        }
        return true
    }

    fun stop() {
        live?.stopAsked = true
    }

    fun dismiss() {
        if (!isWorking) live = null
        changed()
    }

    /** This phone's public key as a file to share: a fleet that names its devices needs it before it begins. */
    fun publicKey(): File {
        val file = File(app.cacheDir, "phone.pub")
        Storage.atomicWrite(file, FleetKey.open(app.filesDir).openSsh("phone"))
        return file
    }

    /** Forget the fleet; adapters that were saved stay. */
    fun leave() {
        if (isWorking) return
        Storage.deleteTree(folder)
        Storage.deleteTree(answers)
        live = null
        offer = null
        standing = null
        changed()
    }

    /** Save the fleet's adapter for [model], and use it; the name that it got. */
    fun save(model: ArtifactInfo): String {
        val device = FleetDevice(app.filesDir)
        val now = standing(device)!!
        val name = "fleet ${now.charter.name} round ${now.rounds}"
        val adapters = app.store.adapters(model.artifact!!)
        if (adapters.list().any { it.name == name }) adapters.delete(name)
        adapters.save(name, device.state!!.flat(), mapOf("fleet" to now.charter.name, "rounds" to now.rounds, "hash" to now.hash))
        adapters.activate(name)
        return name
    }

    private fun standing(device: FleetDevice): Standing? {
        val charter = device.charter ?: return null
        val state = device.state!!
        return Standing(charter, state.round, Storage.hex(state.digest()), answers.listFiles()?.firstOrNull { it.name.endsWith(FleetFile.SUFFIX) })
    }

    /** The round's thread. A training that is asked for meanwhile waits: two programs do not fit into a phone. */
    private fun drive(live: Live) {
        var program: Program? = null
        app.turn.acquireUninterruptibly()
        val result = try {
            val device = FleetDevice(app.filesDir)
            val followed = device.state?.round ?: 0
            val taken = device.take(live.offer.data, live.offer.name, { step, _ -> pace(live, step, program) }) { work(live).also { program = it.session.program } }
            val answer = taken.answer
            if (answer != null) keep(answer, "answer of round ${live.offer.task!!.round}${FleetFile.SUFFIX}")
            else if (taken.rounds > followed) Storage.deleteTree(answers) // of a round that is over
            Result.success(taken)
        } catch (error: Throwable) {
            Result.failure(error)
        } finally {
            program?.close()
            app.turn.release()
        }
        val now = try {
            standing(FleetDevice(app.filesDir))
        } catch (_: OndeviceException) { // what is wrong with it was said by the round
            null
        }
        app.jobs.onMain {
            standing = now
            result.onSuccess {
                live.taken = it
                offer = null
            }.onFailure { if (it is Stopped) this.live = null else live.error = Jobs.plain(it) }
            changed()
        }
    }

    private fun work(live: Live): FleetWork {
        val model = live.model ?: throw OndeviceException(ErrorKind.FLEET, "no model here is the fleet's", live.offer.charter.modelSource, "none", "import the fleet's program")
        val artifact = app.store.open(model)
        live.offer.charter.check(artifact.manifest)
        val tokenizer = artifact.tokenizer()
        val data = live.data ?: throw OndeviceException(ErrorKind.FLEET, "a round needs rows of this phone", "a data file", "none", "import one, or write examples")
        val rows = Encoder(tokenizer, artifact.manifest.longestTokens).encode(app.store.rows(app.store.dataFile(data), artifact))
        return FleetWork(Session(artifact, app.openProgram(artifact)), rows.items.map { it.example }, tokenizer.padId)
    }

    /** Before each local step: say which, and wait while the phone is too hot, too empty or too full, as training does. */
    private fun pace(live: Live, step: Int, program: Program?) {
        var held = emptySet<PauseCause>()
        while (true) {
            if (live.stopAsked) throw Stopped()
            val reasons = PauseRules.reasons(app.health.now(), Rules(), held)
            if (reasons.isNotEmpty() && held.isEmpty()) program?.unload()
            held = reasons.mapTo(LinkedHashSet()) { it.cause }
            app.jobs.onMain {
                live.step = step
                live.reasons = reasons
                changed()
            }
            if (reasons.isEmpty()) return
            Thread.sleep(PAUSE_LOOK_MS)
        }
    }

    private fun keep(answer: ByteArray, name: String) {
        Storage.deleteTree(answers)
        Storage.atomicWrite(File(answers, name), answer)
    }

    private companion object {
        /** A carried file is below 2 kB; more than this is not read. */
        const val MOST_BYTES = 64 shl 10
        const val PAUSE_LOOK_MS = 500L
    }
}
