package org.ondevice.app

import android.content.Intent
import android.net.Uri
import android.view.View
import android.view.ViewGroup
import android.widget.EditText
import android.widget.Spinner
import android.widget.TextView
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNull
import org.junit.Assert.assertThrows
import org.junit.Assert.assertTrue
import org.junit.Test
import org.ondevice.core.Adapters
import org.ondevice.core.AnswersInfo
import org.ondevice.core.Artifact
import org.ondevice.core.Json
import org.ondevice.core.PeftAdapter
import org.ondevice.core.PipeProgram
import org.robolectric.RuntimeEnvironment
import org.robolectric.Shadows.shadowOf
import java.io.File
import java.io.FileNotFoundException
import java.util.zip.ZipInputStream

class TryAndAdaptersTest : AppTest() {
    private val adapters get() = app.store.models()[0].let { app.store.adapters(it.artifact!!) }

    /** A model with two adapters, the newer one in use. */
    private fun trained() {
        if (app.store.models().isEmpty()) importModel()
        val size = app.store.models()[0].manifest!!.spec.adapterSize
        for ((index, name) in listOf("reviews 2026-11-20 18.30.00", "reviews 2026-11-21 09.12.44").withIndex()) {
            val used = app.store.models()[0].manifest!!.spec.layout.sumOf { it.count }
            adapters.save(name, FloatArray(size) { if (it < used) 0.5f * (index + 1) * ((it % 7) - 3) else 0f }, mapOf("steps" to 200 * (index + 1), "loss_before" to 3.412, "loss_after" to 0.871 - 0.2 * index))
            adapters.activate(name)
        }
    }

    @Test
    fun comparesBeforeAndAfter() {
        trained()
        open(3)
        untilSaid("answered by one of: terrible, great")
        find<EditText>(R.id.prompt).setText("A warm, funny film that never looks away.")
        click(R.id.compare)
        until("the comparison") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        val sides = find<ViewGroup>(R.id.sides)
        val words = (0 until 2).map { side -> views(sides.getChildAt(side)).filterIsInstance<TextView>().map { it.text.toString() } }
        assertEquals(listOf("Before", "After"), words.map { it[0] })
        assertEquals(setOf("terrible", "great"), words[0].filterIndexed { index, _ -> index in listOf(1, 3) }.toSet())
        assertFalse("the adapter changes nothing: $words", words[0].drop(1) == words[1].drop(1))
        assertEquals("A warm, funny film that never looks away.", find<EditText>(R.id.prompt).text.toString())
        shot("try")
        rotate()
        assertEquals(2, find<ViewGroup>(R.id.sides).childCount)
        assertEquals("A warm, funny film that never looks away.", find<EditText>(R.id.prompt).text.toString())
    }

    /** A program of no task that can write, with the adapter that Python trained. */
    private fun writer(name: String = "stories", folder: String = "writer") {
        importModel(name, File(fixtures, folder))
        val artifact = app.store.models().first { it.name == name }.artifact!!
        addAdapter(app.store.adapters(artifact), artifact)
        val root = File(property("ondevice.root")).canonicalFile
        app.openProgram = { PipeProgram(it.folder, property("ondevice.python"), root) }
        app.openAnswers = { PipeProgram(it.folder, property("ondevice.python"), root, AnswersInfo.PROGRAM_NAME) }
    }

    /** The adapter that Python trained, without its record: what the model was exported for holds. */
    private fun addAdapter(adapters: Adapters, artifact: Artifact) {
        adapters.save("from Python", PeftAdapter(artifact).read(File(fixtures, "blocks run/adapter")))
        adapters.activate("from Python")
    }

    private fun sideWords(): List<List<String>> = find<ViewGroup>(R.id.sides).let { sides ->
        (0 until sides.childCount).map { side -> views(sides.getChildAt(side)).filterIsInstance<TextView>().map { it.text.toString() } }
    }

    /** A template of one's own came with the model: each label has the probability that Python computes. */
    @Test
    fun classifiesByATemplateOfOnesOwn() {
        importModel("tickets", File(fixtures, "tickets artifact"))
        val artifact = app.store.models()[0].artifact!!
        addAdapter(adapters, artifact)
        val root = File(property("ondevice.root")).canonicalFile
        app.openProgram = { PipeProgram(it.folder, property("ondevice.python"), root) }
        open(3)
        untilSaid("Asked as “Ticket: …\nTeam:”, answered by one of: Billing, Technical help, Größe 🐈")
        val expected = (Json.parse(File(fixtures, "scores.json").readText()) as List<*>)[0] as Map<*, *>
        find<EditText>(R.id.prompt).setText(expected["text"] as String)
        click(R.id.compare)
        until("the labels") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        val shares = (expected["shares"] as List<*>).map { it as Double }
        val labels = listOf("Billing", "Technical help", "Größe 🐈").zip(shares).sortedByDescending { it.second }
        val said = labels.flatMap { (label, share) -> listOf(label, "${Words.number(share * 100, 1)} %") }
        assertEquals(said, sideWords()[1].drop(1).take(6))
        shot("try-labels")
    }

    /** From a semicolon table to labels with probabilities, all on the phone. */
    @Test
    fun aTableIsTrainedOnAndItsLabelsAreThoseOfTry() {
        importModel()
        val table = "Text;Label\n" + (1..6).joinToString("") { "\"card $it; please\";billing\nno start $it;technical\n" }
        app.store.importData("tickets.csv", table.byteInputStream())
        assertEquals(12, app.store.lines(app.store.dataFiles()[0]))
        begin(2)
        until("the run's end", 120) { app.runs.live?.isOver == true }
        assertNull(app.runs.live!!.error)
        val task = adapters.task(adapters.activeName()!!)!!
        assertEquals(listOf("billing", "technical"), task.labels.values.toList())
        open(3)
        untilSaid("answered by one of: billing, technical")
        find<EditText>(R.id.prompt).setText("my card")
        click(R.id.compare)
        until("the labels") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        assertEquals(setOf("billing", "technical"), setOf(sideWords()[1][1], sideWords()[1][3]))
        shot("try-labels-of-rows")
    }

    /** The same from the program with packed weights, up to a text that ends it. */
    @Test
    fun writesWithPackedWeightsAndStopsAtATextThatEndsIt() {
        val expected = Json.parse(File(fixtures, "blocks answers.json").readText()) as Map<*, *>
        val answer = expected["after"] as String
        writer(folder = "packed answers")
        open(3)
        find<EditText>(R.id.prompt).setText(expected["prompt"] as String)
        find<EditText>(R.id.stop_texts).setText("never there\n ${answer.substring(3, 5).trim()} ")
        click(R.id.compare)
        until("the answers") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        assertEquals(answer.substringBefore(answer.substring(3, 5).trim()), app.lastTrial!!.result.after!!.text)
        val lacking = ModuleProgram.missing(setOf("llama::custom_sdpa.out"), emptySet(), setOf("XnnpackBackend"), setOf("XnnpackBackend"))!!
        app.openAnswers = { throw lacking }
        click(R.id.compare)
        until("what is missing") { app.jobs.error(TryScreen.PLACE) != null }
        untilSaid("llama::custom_sdpa.out")
    }

    @Test
    fun writesWhatPythonWrites() {
        val expected = Json.parse(File(fixtures, "blocks answers.json").readText()) as Map<*, *>
        writer()
        open(3)
        assertNull("a program that writes asks for no answers", activity.findViewById(R.id.answers))
        find<EditText>(R.id.prompt).setText(expected["prompt"] as String)
        click(R.id.compare)
        until("the answers") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        val sides = find<ViewGroup>(R.id.sides)
        val words = (0 until 2).map { side -> views(sides.getChildAt(side)).filterIsInstance<TextView>().map { it.text.toString() } }
        assertEquals(listOf(listOf("Before", expected["before"]), listOf("After", expected["after"])), words.map { it.take(2) })
        click(words(true, expected["after"] as String))
        click(words(false, expected["before"] as String))
        shot("try-writes")
        assertEquals(listOf(expected["after"] to true, expected["before"] to false), app.store.judged.read().map { it.answer to it.liked })
        assertEquals(setOf(expected["prompt"]), app.store.judged.read().map { it.prompt }.toSet())

        activity.open(1)
        settle()
        untilSaid("Answers that you judged")
        shot("data-judged")
        click("Delete judgement 2")
        assertEquals("Delete judgement 2?", confirm())
        assertEquals(listOf(expected["after"]), app.store.judged.read().map { it.answer })
        assertEquals("no run trains on them", emptyList<File>(), app.store.dataFiles())
    }

    private fun words(up: Boolean, answer: String) = "${if (up) "Good" else "Bad"} answer: $answer"

    /** Answers appear while they are written, a stop keeps what is there, and two adapters can stand side by side. */
    @Test
    fun showsWhatIsWrittenAndStops() {
        writer()
        val python = app.openProgram
        val gate = java.util.concurrent.Semaphore(0)
        app.openProgram = { artifact ->
            val real = python(artifact)
            object : org.ondevice.core.Program by real {
                override fun execute(method: String, inputs: List<org.ondevice.core.Tensor>, layer: Int): List<org.ondevice.core.Tensor> {
                    if (method.startsWith("embed_")) gate.acquire()
                    return real.execute(method, inputs, layer)
                }
            }
        }
        open(3)
        find<Spinner>(R.id.other).setSelection(1)
        find<android.widget.Switch>(R.id.as_chat).isChecked = true
        find<EditText>(R.id.prompt).setText("Good?")
        click(R.id.compare)
        gate.release(3)
        until("three tokens") { app.lastTrial?.result?.before?.text?.isNotEmpty() == true && gate.availablePermits() == 0 }
        val soFar = app.lastTrial!!.result.before.text!!
        until("them on the screen") { soFar in texts() }
        assertNull("the other side has not begun", app.lastTrial!!.result.after)
        assertNull("it cannot be judged yet", activity.window.decorView.findViewById<View>(R.id.sides).let { sides -> views(sides).firstOrNull { it is android.widget.Button } })
        shot("try-writing")
        click(R.id.stop)
        gate.release(1000)
        until("the end") { app.jobs.words(TryScreen.PLACE) == null }
        assertNull(app.jobs.error(TryScreen.PLACE))
        val sides = find<ViewGroup>(R.id.sides)
        val headings = (0 until 2).map { side -> views(sides.getChildAt(side)).filterIsInstance<TextView>().first().text.toString() }
        assertEquals("both sides are the same adapter", listOf("from Python", "from Python"), headings)
        assertTrue(app.lastTrial!!.result.before.text!!.startsWith(soFar))
        assertTrue("32 tokens were not written", gate.availablePermits() > 940)
        click(R.id.compare)
        until("both answers") { app.jobs.words(TryScreen.PLACE) == null }
        val whole = app.lastTrial!!.result.before.text!!
        assertEquals(whole, app.lastTrial!!.result.after!!.text)
        // Another length, and drawing: what stands in the fields holds, and is refused where it cannot be.
        find<EditText>(R.id.longest).setText("3")
        find<EditText>(R.id.heat).setText("0,5")
        find<EditText>(R.id.top_p).setText("0.000001")
        click(R.id.compare)
        until("short answers") { app.jobs.words(TryScreen.PLACE) == null }
        val short = app.lastTrial!!.result.after!!.text!!
        assertTrue("$short begins $whole", whole.startsWith(short) && short.length < whole.length)
        find<EditText>(R.id.top_p).setText("2")
        click(R.id.compare)
        until("the refusal") { app.jobs.error(TryScreen.PLACE) != null }
        untilSaid("top-p 2.0")
    }

    @Test
    fun eachModelIsAskedInItsOwnWay() {
        writer()
        importModel("film reviews")
        open(3)
        untilSaid("Nothing trained yet") // a model without an adapter must not hide the others
        find<Spinner>(R.id.model).setSelection(1)
        until("the other model") { "Prompt" in texts() }
        assertEquals("from Python", find<Spinner>(R.id.adapter).selectedItem)
        trained()
        find<Spinner>(R.id.model).setSelection(0)
        until("the task") { "answered by one of: terrible, great" in texts() }
        assertEquals("reviews 2026-11-21 09.12.44", find<Spinner>(R.id.adapter).selectedItem)
        shot("try-models")
    }

    @Test
    fun anEmptyTextIsRefused() {
        trained()
        open(3)
        click(R.id.compare)
        until("the refusal") { app.jobs.error(TryScreen.PLACE) != null }
        untilSaid("is empty")
    }

    @Test
    fun saysWhatToDoWithoutAnAdapter() {
        importModel()
        open(3)
        untilSaid("Nothing trained yet")
        activity.open(4)
        settle()
        untilSaid("No adapter yet")
    }

    @Test
    fun listsUsesRollsBackAndDeletes() {
        trained()
        open(4)
        untilSaid("400 steps, loss 3.412 → 0.671")
        shot("adapters")
        click(R.id.roll_back)
        assertEquals("reviews 2026-11-20 18.30.00", adapters.activeName())
        click("Use reviews 2026-11-21 09.12.44")
        assertEquals("reviews 2026-11-21 09.12.44", adapters.activeName())
        click("Delete reviews 2026-11-21 09.12.44")
        assertTrue("reviews 2026-11-21 09.12.44" in confirm())
        assertEquals(listOf("reviews 2026-11-20 18.30.00"), adapters.list().map { it.name })
        assertEquals("reviews 2026-11-20 18.30.00", adapters.activeName())
    }

    @Test
    fun sharesAZipThatAnotherAppCanRead() {
        trained()
        open(4)
        click("Share reviews 2026-11-21 09.12.44")
        until("the share sheet") { shadowOf(activity).peekNextStartedActivity() != null }
        val chooser = shadowOf(activity).nextStartedActivity
        val send: Intent = chooser.getParcelableExtra(Intent.EXTRA_INTENT, Intent::class.java)!!
        assertTrue(send.flags and Intent.FLAG_GRANT_READ_URI_PERMISSION != 0)
        val uri: Uri = send.getParcelableExtra(Intent.EXTRA_STREAM, Uri::class.java)!!
        val provider = ShareProvider().apply { attachInfo(app, android.content.pm.ProviderInfo().apply { authority = "org.ondevice.app.share"; grantUriPermissions = true }) }
        val names = java.io.FileInputStream(provider.openFile(uri, "r").fileDescriptor).use { stream ->
            val zip = ZipInputStream(stream)
            generateSequence { zip.nextEntry }.map { it.name }.toList()
        }
        assertTrue("$names", "adapter_model.safetensors" in names && "adapter_config.json" in names)
        assertTrue("$names", "mlx-lm/adapters.safetensors" in names && "mlx-lm/adapter_config.json" in names)
        assertThrows(FileNotFoundException::class.java) { provider.openFile(uri, "w") }
        val outside = Uri.Builder().scheme("content").authority(uri.authority).appendPath("../../files/wanted.json").build()
        app.wanted.write(RunPlan("run-x", "m", "d", 1, 0.1, org.ondevice.core.Rules()))
        assertThrows(FileNotFoundException::class.java) { provider.openFile(outside, "r") }
    }

    @Test
    fun looksRightAtNight() {
        RuntimeEnvironment.setQualifiers("+night")
        trained()
        open(4)
        shot("adapters-night")
    }

    @Test
    fun looksRightFromRightToLeft() {
        RuntimeEnvironment.setQualifiers("+ar-ldrtl")
        trained()
        open(4)
        assertEquals(View.LAYOUT_DIRECTION_RTL, activity.window.decorView.layoutDirection)
        shot("adapters-rtl")
    }
}
